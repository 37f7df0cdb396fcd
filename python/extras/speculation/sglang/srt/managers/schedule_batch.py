"""Retraction with draft KV, and the slots that speculative steps write to.

Upstream: sgl-project/sglang#34801 (merged) saves drafts at a retraction, with a hierarchical cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req", "ScheduleBatch"]


class Req(engine.Req):
    """A request whose draft's KV is saved with its own."""

    # While it is retracted; from the pool's `get_cpu_copy`.
    draft_kv_cache_cpu: list | None = None

    def offload_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the draft's KV."""
        super().offload_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        draft_pool = getattr(token_to_kv_pool_allocator, "draft_kv_pool", None)
        if draft_pool is not None:
            table = req_to_token_pool.req_to_token[self.req_pool_idx, : self.seqlen - 1]
            self.draft_kv_cache_cpu = draft_pool.get_cpu_copy(table)

    def load_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the draft's KV."""
        super().load_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        self._load_draft_kv(req_to_token_pool, token_to_kv_pool_allocator, 0)

    def restore_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        """Adds the draft's KV."""
        super().restore_kv_cache(req_to_token_pool, token_to_kv_pool_allocator, start)
        self._load_draft_kv(req_to_token_pool, token_to_kv_pool_allocator, start)

    def forget_saved_kv(self) -> None:
        """Adds the draft's KV."""
        super().forget_saved_kv()
        self.draft_kv_cache_cpu = None

    def _load_draft_kv(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        saved, self.draft_kv_cache_cpu = self.draft_kv_cache_cpu, None
        end = self.seqlen - 1
        if saved is not None and start < end:
            draft_pool = token_to_kv_pool_allocator.draft_kv_pool
            table = req_to_token_pool.req_to_token[self.req_pool_idx, start:end]
            engine.load_saved(draft_pool, draft_pool, saved, table, start)


class ScheduleBatch(engine.ScheduleBatch):
    """Keeps the draft state of retracted requests."""

    # Draft state of overlapped steps; set with a decode worker's first batch.
    future_map: ClassVar[Any] = None

    def slots_written(self, at: list[int]) -> np.ndarray:
        """From the committed tokens to the allocated ones. Both figures are those of the launch: an ending request's
        result is that of the step before."""
        if self.spec_algorithm.is_none():
            return super().slots_written(at)
        table, parts = self.req_to_token_pool.req_to_token, []
        for req in map(self.reqs.__getitem__, at):
            parts.append(table[req.freed_row, req.kv_committed_len : req.kv_allocated_len])
        return torch.cat(parts).long().cpu().numpy()

    def process_prebuilt(self, server_args, future_map) -> None:
        """Notes where overlapped steps keep draft states; resumed requests keep theirs."""
        ScheduleBatch.future_map = future_map
        super().process_prebuilt(server_args, future_map)

    def release_req(self, idx: int, remaing_req_count: int, server_args) -> None:
        """Saves the request's draft state.

        In the engine it resumes with the state that prefill sent, and fewer drafts are accepted.
        """
        drafts = self.spec_algorithm.is_eagle() and not server_args.enable_multi_layer_eagle
        if server_args.disaggregation_mode == "decode" and drafts:
            req, state = self.reqs[idx], self.spec_info
            at: Any = idx
            topk_p, topk_index, hidden = state.topk_p, state.topk_index, state.hidden_states
            if state.future_indices is not None:
                at, futures = state.future_indices.indices[idx], self.future_map
                topk_p, topk_index, hidden = futures.topk_p_buf, futures.topk_index_buf, futures.hidden_states_buf
            req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = (
                tensor[at].cpu().clone() for tensor in (topk_p, topk_index, hidden)
            )
        super().release_req(idx, remaing_req_count, server_args)
