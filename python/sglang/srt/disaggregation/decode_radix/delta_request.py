"""Asks prefill for the delta of an admitted request: the pages that the tree lacks.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.disaggregation.common.wire import PROMPT
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.schedule import takes_prefix
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.decode_radix.overlap_guard import OverlapGuard

DEFERRED, ASKED = Phase.DEFERRED, Phase.ASKED


class PrefillDeltas:
    """Asks prefill for the deltas of one decode rank."""

    def __init__(self, queue: DecodePreallocQueue):
        self._queue, self._tree, self._rows = queue, queue.radix, queue.req_to_token_pool
        self._buffer_indices = queue.req_to_metadata_buffer_idx_allocator
        # Requests admitted in this step, with their `_targets`.
        self._admitted: list[tuple[DecodeRequest, list[torch.Tensor]]] = []

    def room(self) -> int:
        """Requests for which there is a metadata buffer."""
        return self._buffer_indices.available_size()

    def request(self, decode_req: DecodeRequest) -> None:
        """Have `ask_admitted` ask for the delta of a request that has its memory."""
        req = decode_req.req
        req.transfer_prefix_len = req.held_len
        decode_req.metadata_buffer_index = index = self._buffer_indices.alloc()
        if not is_warmup(req):
            self._expect_metadata(decode_req.kv_receiver, index)
        self._admitted.append((decode_req, self._targets(decode_req)))

    def ask_admitted(self, guard: OverlapGuard) -> None:
        """Ask for the deltas of this step's admissions, now or after the batch behind ``guard``.

        One copy brings the pages of all of them to the host.
        """
        admitted, self._admitted = self._admitted, []
        if not admitted:
            return
        parts = [part for _, targets in admitted for part in targets]
        try:
            host = torch.cat(parts).cpu().numpy()
            found = np.split(host, np.cumsum([len(part) for part in parts])[:-1])
        except Exception as e:
            for decode_req, _ in admitted:
                decode_req.mark_failed(e)
            return
        each = len(parts) // len(admitted)
        for i, (decode_req, _) in enumerate(admitted):
            try:
                waits = self._name(decode_req, guard, *found[i * each : (i + 1) * each])
                if waits:
                    decode_req.advance(DEFERRED)
                else:
                    self._ask(decode_req)
            except Exception as e:
                decode_req.mark_failed(e)

    def _targets(self, decode_req: DecodeRequest) -> list[torch.Tensor]:
        """On the device: first slots of the delta's pages, and targets of state."""
        req, tree = decode_req.req, self._tree
        table = self._rows.req_to_token[req.req_pool_idx, : len(req.origin_input_ids)]
        states = tree.state.targets(req, table)
        return [table[req.held_len :: tree.page_size], states]

    def _name(
        self, decode_req: DecodeRequest, guard: OverlapGuard, delta: np.ndarray, states: np.ndarray
    ) -> bool:
        """Set what prefill is to write to. Returns whether to ask one step later.

        delta, states: the `_targets`, on the host.
        """
        decode_req.page_indices = (delta // self._tree.page_size).astype(np.int32)
        decode_req.state_indices = self._tree.state.indices(states)
        return guard.covers(decode_req.page_indices, decode_req.state_indices)

    def _expect_metadata(self, receiver: Any, index: int) -> None:
        """Have ``receiver`` check the room in buffer ``index``, and wait for writers on failure."""
        # The last request's room would read as corruption; 0 reads as not arrived. On a device, the
        # copy of the page numbers waits for this write, and prefill is asked after that copy.
        room = self._queue.metadata_buffers.bootstrap_room[index]
        room.zero_()
        receiver.metadata_room = lambda: int(room[0])
        receiver.fenced = True

    def ask_deferred(self, decode_reqs: Iterable[DecodeRequest]) -> None:
        """Ask for the deltas that waited for an in-flight batch, which is over."""
        for decode_req in decode_reqs:
            if decode_req.phase is DEFERRED:
                try:
                    self._ask(decode_req)
                except Exception as e:
                    decode_req.mark_failed(e)

    def _ask(self, decode_req: DecodeRequest) -> None:
        """Send prefill the message that names what it is to write."""
        decode_req.advance(ASKED)
        req, receiver, index = (
            decode_req.req,
            decode_req.kv_receiver,
            decode_req.metadata_buffer_index,
        )
        pages, states = decode_req.page_indices, decode_req.state_indices
        if takes_prefix(decode_req):
            if (
                hasattr(receiver, "prompt")
                and receiver.kv_mgr.prefills.of(receiver.bootstrap_addr).prompts
            ):
                receiver.prompt = PROMPT, decode_req.said_prompt()
            receiver.send_metadata(pages, index, states, decode_prefix_len=req.transfer_prefix_len)
        else:
            receiver.send_metadata(pages, index, states)
        req.time_stats.set_decode_transfer_queue_entry_time()
