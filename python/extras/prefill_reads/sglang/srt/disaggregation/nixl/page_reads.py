"""Reads whole KV pages from a decode rank's memory over NIXL.

Decode's memory and agent are registered since the handshake, for prefill's writes; reads need nothing more.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PageReads", "PostedRead"]

# Regions per turn: page runs times buffers. NIXL takes 2.3 us for each on the scheduler's thread; the bound keeps this
# below the time of one prefill chunk.
MOST_REGIONS = 65536


class PostedRead:
    """A posted read. It may write to its pages while its state is ``PROC``."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle, self._state = agent, handle, "PROC"

    def state(self) -> str:
        """``PROC``, ``DONE`` or ``ERR``. NIXL raises if the peer is lost: ``ERR``."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception:
                self._state = "ERR"
            if self._state != "PROC":
                self.release()
        return self._state

    def release(self) -> None:
        """Release its handle; NIXL cancels a partly posted read."""
        handle, self._handle = self._handle, None
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            # NIXL may keep the handle of a failed read.
            return


class PageReads:
    """Reads pages for one prefill rank.

    agent: NIXL's. kv_args: the engine's, of this rank. peers: decode ranks' registrations by agent name. tp_size: of
    this worker.
    """

    def __init__(self, agent: Any, kv_args: Any, peers: Mapping[str, Any], tp_size: int) -> None:
        self._agent, self._kv_args, self._peers, self._tp_size = agent, kv_args, peers, tp_size
        # Regions in this turn.
        self._posted = 0

    def fits(self, agent_name: str) -> bool:
        """Whether that decode rank's pages have this rank's layout."""
        peer, own = self._peers.get(agent_name), self._kv_args
        return (
            peer is not None
            and peer.decode_tp_size == self._tp_size
            and len(peer.dst_kv_ptrs) == len(own.kv_data_ptrs)
            and peer.dst_kv_item_len == own.kv_item_lens[0]
        )

    def begin_turn(self) -> None:
        """A new turn of the scheduler's loop."""
        self._posted = 0

    def post(self, agent_name: str, theirs: npt.NDArray[np.int32], ours: npt.NDArray[np.int32]) -> PostedRead | None:
        """Begin to read pages ``theirs`` into as many pages ``ours``.

        None if this turn's regions are used up. Raises NIXL's errors.
        """
        peer, own = self._peers[agent_name], self._kv_args
        cuts = np.flatnonzero((np.diff(theirs) != 1) | (np.diff(ours) != 1)) + 1
        starts = np.concatenate(([0], cuts))
        num_regions = len(starts) * len(own.kv_data_ptrs)
        if num_regions > MOST_REGIONS:
            raise RuntimeError(f"too many regions: {len(starts)} page runs in {len(own.kv_data_ptrs)} buffers")
        if self._posted and self._posted + num_regions > MOST_REGIONS:
            return None
        self._posted += num_regions
        lengths = np.diff(np.concatenate((starts, [len(ours)])))

        def regions(bases: list[int], pages: npt.NDArray[np.int32], gpu: int) -> Any:
            firsts = pages[starts].astype(np.int64)
            rows = [
                np.column_stack((base + firsts * item, lengths * item, np.full_like(firsts, gpu)))
                for base, item in zip(bases, own.kv_item_lens, strict=True)
            ]
            return self._agent.get_xfer_descs(np.concatenate(rows), "VRAM")

        into = regions(own.kv_data_ptrs, ours, own.gpu_id)
        out_of = regions(peer.dst_kv_ptrs, theirs, peer.gpu_id)
        # No notification: decode waits for prefill's writes.
        handle = self._agent.initialize_xfer("READ", into, out_of, agent_name, b"")
        if not handle:
            raise RuntimeError("NIXL made no transfer")
        posted = PostedRead(self._agent, handle)
        try:
            if self._agent.transfer(handle) == "ERR":
                raise RuntimeError("NIXL could not post the transfer")
        except Exception:
            posted.release()
            raise
        return posted
