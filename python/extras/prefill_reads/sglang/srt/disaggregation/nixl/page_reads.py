"""Reads of whole pages of KV out of a decode rank's memory, over NIXL.

Decode's memory is registered and its agent known since its handshake, for prefill's writes; a read takes nothing more.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PageReads", "PostedRead"]

# Regions, which are runs of pages times buffers. NIXL takes 2.3 us for each on the thread that posts, the scheduler's,
# which the reads of a turn may hold up as a chunk of a prompt does and no longer.
MOST_REGIONS = 65536


class PostedRead:
    """A read that has been posted. It may write to its pages as long as its state is ``PROC``."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle, self._state = agent, handle, "PROC"

    def state(self) -> str:
        """``PROC``, ``DONE`` or ``ERR``. NIXL raises for one whose peer is lost."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception:
                self._state = "ERR"
            if self._state != "PROC":
                self.release()
        return self._state

    def release(self) -> None:
        """Give its handle back; of one that could not be posted in full, NIXL ends the rest."""
        handle, self._handle = self._handle, None
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            # Of one that has failed NIXL may keep it.
            return


class PageReads:
    """Reads pages for one prefill rank.

    agent: NIXL's. kv_args: the engine's, of this rank. peers: what decode ranks have registered, by agents' names.
    tp_size: ranks that share the heads here.
    """

    def __init__(self, agent: Any, kv_args: Any, peers: Mapping[str, Any], tp_size: int) -> None:
        self._agent, self._kv_args, self._peers, self._tp_size = agent, kv_args, peers, tp_size
        # Regions, in this turn.
        self._posted = 0

    def fits(self, agent_name: str) -> bool:
        """Whether a page of that decode rank is as a page here, so that it can be read as it is."""
        peer, own = self._peers.get(agent_name), self._kv_args
        return (
            peer is not None
            and peer.decode_tp_size == self._tp_size
            and len(peer.dst_kv_ptrs) == len(own.kv_data_ptrs)
            and peer.dst_kv_item_len == own.kv_item_lens[0]
        )

    def begin_turn(self) -> None:
        """What is posted from here on is of another turn of the scheduler's loop."""
        self._posted = 0

    def post(self, agent_name: str, theirs: npt.NDArray[np.int32], ours: npt.NDArray[np.int32]) -> PostedRead | None:
        """Begin to read pages ``theirs`` into pages ``ours``, of which there are as many.

        None if so much has been posted in this turn that it has to wait for another. Raises what NIXL raises.
        """
        peer, own = self._peers[agent_name], self._kv_args
        cuts = np.flatnonzero((np.diff(theirs) != 1) | (np.diff(ours) != 1)) + 1
        starts = np.concatenate(([0], cuts))
        num_regions = len(starts) * len(own.kv_data_ptrs)
        if num_regions > MOST_REGIONS:
            raise RuntimeError(f"its pages are in {len(starts)} runs, times {len(own.kv_data_ptrs)} buffers")
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
        # Decode is told nothing: it waits for what prefill writes.
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
