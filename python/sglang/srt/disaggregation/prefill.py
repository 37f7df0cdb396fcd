"""Prefill worker that skips what decode already holds.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.utils import prepare_abort

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["PrefillBootstrapQueue", "SchedulerDisaggregationPrefillMixin"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Starts each request's chunk cursor at decode's prefix."""

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Adds the prompt length to the sender, which checks decode's request for KV against it."""
        super().add(req, num_kv_heads)
        if isinstance(req.disagg_kv_sender, CommonKVSender):
            req.disagg_kv_sender.prompt_len = len(req.origin_input_ids)
            # The engine truncates prompts of this or a greater length to this length.
            req.disagg_kv_sender.is_cut = (
                len(req.origin_input_ids) >= self.scheduler.max_req_input_len
            )

    def pop_bootstrapped(
        self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None
    ):
        """Sets the chunk cursor of the requests that the engine pops."""
        popped, failed = self.pop_and_answer(rids_to_check)
        for req in popped:
            req.start_send_idx = getattr(req.disagg_kv_sender, "decode_prefix_len", 0)
        for req in failed:
            events_of(self.scheduler.server_args).ended(req.finished_reason)
        return (popped, failed) if return_failed_reqs else popped

    def pop_and_answer(self, rids_to_check: list[str] | None):
        """Pop as the engine, which also answers the clients of failed requests."""
        return super().pop_bootstrapped(True, rids_to_check)


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Sends the part of a chunk beyond decode's prefix."""

    def process_disagg_prefill_inflight_queue(self, *args, **kwargs):
        """Adds `settle`, and counts the requests that end in this call."""
        self.settle()
        ended = {id(req) for req in self.disagg_prefill_inflight_queue if req.finished()}
        done = super().process_disagg_prefill_inflight_queue(*args, **kwargs)
        for req in done:
            if id(req) not in ended:
                events_of(self.server_args).ended(req.finished_reason)
        return done

    def settle(self) -> None:
        """Do backend work that no request's poll does, in idle steps too; fail overdue requests."""
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        if isinstance(manager, CommonKVManager):
            manager.settle()
            for req in self.disagg_prefill_inflight_queue:
                if isinstance(req.disagg_kv_sender, CommonKVSender):
                    req.disagg_kv_sender.fail_if_overdue()

    def process_batch_result_disagg_prefill(self, batch, result) -> None:
        """Makes top logprobs lists; reports requests whose grammar rejects the token."""
        if result.copy_done is not None:
            result.copy_done.synchronize()
        output = result.logits_output
        for name in ("next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
            values = getattr(output, name, None) if batch.return_logprob else None
            if values:
                setattr(
                    output, name, [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
                )
        super().process_batch_result_disagg_prefill(batch, result)
        for req in batch.reqs:
            if (
                req.output_ids
                and not req.finished()
                and getattr(req.to_finish, "status_code", 0) == 400
            ):
                prepare_abort(req, req.to_finish.message, status_code=HTTPStatus.BAD_REQUEST)
                self.stream_output([req], req.return_logprob)

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
        """Wraps the engine's send: the cursor only moves forward; a last chunk may carry no KV.

        A chunk that ends at or before the cursor sends nothing; the engine would move it back. If
        decode holds the whole prompt, the last chunk carries the metadata, and the state if any.
        """
        page_size = self.token_to_kv_pool_allocator.page_size
        end = min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
        if not last_chunk and end - end % page_size <= req.start_send_idx:
            return
        if not last_chunk and self.pp_size > 1 and self.launch_event is not None:
            # With --pp-async-batch-depth, the last stage has not waited for this event.
            self.launch_event.synchronize()
        full_hit = last_chunk and req.start_send_idx >= end
        if not full_hit:
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        self.disagg_metadata_buffers.set_buf(req)
        req.disagg_kv_sender.send(np.empty(0, dtype=np.int32), self.state_of(req))

    def state_of(self, req: Req) -> list[int] | None:
        """The state that the engine sends with a last chunk; see `CommonKVManager.unfit`."""
        return None
