"""Prefill worker that skips what decode already holds.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.page_digest import PageDigests
from sglang.srt.disaggregation.utils import kv_to_page_indices
from sglang.srt.mem_cache.decode_windows import Windows
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["PrefillBootstrapQueue", "SchedulerDisaggregationPrefillMixin"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Starts each request's chunk cursor at the prefix that decode holds."""

    def _init_kv_manager(self):
        """Adds what digests of pages are computed from, for a decode worker that asks for them."""
        manager = super()._init_kv_manager()
        if isinstance(manager, CommonKVManager):
            # A decode worker with such a pool has been refused the option, and does not ask.
            with contextlib.suppress(ValueError):
                manager.page_digests = PageDigests.of_rank(
                    self.token_to_kv_pool,
                    manager.attn_tp_rank,
                    manager.attn_tp_size,
                    self.scheduler.model_config.get_total_num_kv_heads(),
                )
        return manager

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Adds the prompt length to the request's sender, which checks decode's prefix against it."""
        super().add(req, num_kv_heads)
        if isinstance(req.disagg_kv_sender, CommonKVSender):
            req.disagg_kv_sender.prompt_len = len(req.origin_input_ids)

    def pop_bootstrapped(self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None):
        """Sets the cursor of the requests that the engine pops."""
        popped = super().pop_bootstrapped(return_failed_reqs, rids_to_check)
        for req in popped[0] if return_failed_reqs else popped:
            req.start_send_idx = getattr(req.disagg_kv_sender, "decode_prefix_len", 0)
            req.time_stats.decode_prefix_len = req.start_send_idx
        return popped


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Sends the part of a chunk that lies beyond decode's prefix."""

    def process_disagg_prefill_inflight_queue(self, *args, **kwargs):
        """Adds to this part of every step, idle ones too, what a transfer backend cannot leave to a request's poll."""
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        if isinstance(manager, CommonKVManager):
            manager.settle()
            self._end_lost_prompt()
        return super().process_disagg_prefill_inflight_queue(*args, **kwargs)

    def _end_lost_prompt(self) -> None:
        """Have a prompt whose request has failed end with its next chunk, of one token.

        The engine computes all of it before it tells the client, and with it the router. Not where there are several
        ranks: they learn of a failure in different steps, and must run the same batches.
        """
        req = getattr(self, "chunked_req", None)
        if req is None or self.tp_size * self.pp_size > 1 or req.return_logprob:
            return
        sender, done = req.disagg_kv_sender, len(req.fill_ids)
        if isinstance(sender, CommonKVSender) and sender.has_failed() and len(req.origin_input_ids) > done + 1:
            req.origin_input_ids = req.origin_input_ids[: done + 1]

    def process_batch_result_disagg_prefill(self, batch, result) -> None:
        """Adds that alternatives of tokens are lists where the engine expects lists; tensors end the scheduler."""
        if result.copy_done is not None:
            result.copy_done.synchronize()
        output = result.logits_output
        for name in ("next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
            values = getattr(output, name, None) if batch.return_logprob else None
            if values:
                setattr(output, name, [v.tolist() if isinstance(v, torch.Tensor) else v for v in values])
        super().process_batch_result_disagg_prefill(batch, result)

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
        """Wraps the engine's send: a cursor that only moves forward, and a last chunk that may carry no KV.

        A chunk that ends at or below the cursor sends nothing and leaves the cursor alone; the engine would move it
        back. When decode holds the whole prompt, the last chunk still brings the metadata and the state, if any.
        """
        page_size = self.token_to_kv_pool_allocator.page_size
        end = min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
        if not last_chunk and end - end % page_size <= req.start_send_idx:
            return
        full_hit = last_chunk and req.start_send_idx >= end
        if not full_hit:
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        self.disagg_metadata_buffers.set_buf(req)
        req.disagg_kv_sender.send(np.empty(0, dtype=np.int32), self._state_of(req))

    def _state_of(self, req: Req) -> list[int] | None:
        """What the engine sends beside KV with any last chunk: slot of a state, pages of a window, None for others."""
        table = self.req_to_token_pool
        if req.mamba_pool_idx is not None:
            return [int(table.req_index_to_mamba_index_mapping[req.req_pool_idx])]
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator.get_kvcache(), SWAKVPool):
            return None
        # Decode workers of this package lack the window of every prompt and do not come here.
        window, end = Windows(self.sliding_window_size, allocator.page_size), len(req.fill_ids)
        slots = table.req_to_token[req.req_pool_idx, window.start(end) : end]
        own = allocator.translate_loc_from_full_to_swa(slots)
        return kv_to_page_indices(own.cpu().numpy(), allocator.page_size).tolist()
