"""Prefill worker that skips what decode already holds.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged). The end of lost requests: none is known.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.lost_requests import LostReqs, maybe_lost
from sglang.srt.disaggregation.refusal import AT_FAULT
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

__all__ = ["PrefillBootstrapQueue", "SchedulerDisaggregationPrefillMixin"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Starts each request's chunk cursor at the prefix that decode holds."""

    def _init_kv_manager(self):
        """Adds how many layers all pipeline stages have."""
        manager = super()._init_kv_manager()
        if isinstance(manager, CommonKVManager):
            manager.num_layers = self.scheduler.model_config.num_hidden_layers
        return manager

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Adds the prompt to the request's sender, which checks decode's request for KV by it."""
        super().add(req, num_kv_heads)
        if isinstance(req.disagg_kv_sender, CommonKVSender):
            req.disagg_kv_sender.prompt_len = len(req.origin_input_ids)
            # Of a longer one, or of one that is just too long, the engine has left this.
            req.disagg_kv_sender.is_cut = len(req.origin_input_ids) >= self.scheduler.max_req_input_len

    def pop_bootstrapped(self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None):
        """Sets the cursor of the requests that the engine pops."""
        with _told_at_once(self.scheduler):
            popped, failed = super().pop_bootstrapped(True, rids_to_check)
        for req in popped:
            req.start_send_idx = getattr(req.disagg_kv_sender, "decode_prefix_len", 0)
        for req in failed:
            events_of(self.scheduler.server_args).ended(req.finished_reason)
        return (popped, failed) if return_failed_reqs else popped


def _goes_well(req: Req) -> bool:
    """Whether nothing has gone wrong with a request so far that a decode worker with a radix cache has asked for."""
    sender = req.disagg_kv_sender
    if req.finished() or req.to_finish is not None or not isinstance(sender, CommonKVSender):
        return False
    manager = sender.kv_mgr
    if manager.pp_size > 1 or getattr(manager.server_args, "tokenizer_worker_num", 1) > 1:
        # The last stage, or the process that ends the worker, would not know of what is still being sent.
        return False
    return not sender.has_failed() and names_prefix(sender.state.asked.values())


@contextlib.contextmanager
def _told_at_once(scheduler: Scheduler) -> Iterator[None]:
    """What the engine tells clients of failed requests, each time with a look at all that wait, goes in one message."""
    told: list[Req] = []
    send = scheduler.stream_output
    scheduler.stream_output = lambda reqs, *_: told.extend(reqs)
    try:
        yield
    finally:
        scheduler.stream_output = send
        _tell_once(scheduler, told)


def _tell_once(scheduler: Any, reqs: list[Req]) -> None:
    """Tell the clients of these requests, once for all: each output looks at all that waits here, for its load."""
    if reqs:
        scheduler.stream_output(reqs, any(req.return_logprob for req in reqs))


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Sends the part of a chunk that lies beyond decode's prefix."""

    def process_disagg_prefill_inflight_queue(self, *args, **kwargs):
        """Settles, in every step, idle ones too, what a transfer backend cannot leave to a request's poll.

        The client of a failed request is answered at once; what its writes in flight hold is held until they end.
        """
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        if isinstance(manager, CommonKVManager):
            manager.settle()
            computing = getattr(self, "chunked_req", None)
            if computing is not None and isinstance(computing.disagg_kv_sender, CommonKVSender):
                # Its chunks are sent, which may fail, on one rank alone: decode is told, and tells the others.
                computing.disagg_kv_sender.poll()
            lost: list[Req] = []
            for req in self.disagg_prefill_inflight_queue:
                sender = req.disagg_kv_sender
                if isinstance(sender, CommonKVSender):
                    sender.fail_if_overdue()
                    if sender.has_failed() and not req.finished():
                        self._end_lost(req, sender.failure_reason())
                        lost.append(req)
            _tell_once(self, lost)
        told = {id(req) for req in self.disagg_prefill_inflight_queue if req.finished()}
        done = super().process_disagg_prefill_inflight_queue(*args, **kwargs)
        for req in done:
            if self.attn_tp_rank == 0 and self.server_args.enable_request_time_stats_logging:
                # Once: of one whose client was answered before, the engine has not.
                req.log_time_stats()
            if id(req) not in told:
                events_of(self.server_args).ended(req.finished_reason)
        return done

    def lost_requests(self) -> dict[int, str]:
        """Why requests have failed, as far as this rank knows, that no queue polls, by room.

        Those that wait for their turn, and those of which a part is being computed.
        """
        manager = self.disagg_prefill_bootstrap_queue.kv_manager
        if not isinstance(manager, CommonKVManager):
            return {}
        chunked = () if self.chunked_req is None else (self.chunked_req,)
        lost: dict[int, str] = {}
        for req in maybe_lost((*self.waiting_queue, *chunked, *self._in_flight()), manager.rooms.refused):
            reason = None if req.finished() else req.disagg_kv_sender.failure_reason()
            if reason is not None:
                lost[req.bootstrap_room] = reason
        return lost

    def handle_lost_requests(self, recv_req: LostReqs) -> None:
        """End these requests, in the same step on all ranks: nothing more is computed for them."""

        def lose(req: Req | None) -> bool:
            if req is None or not isinstance(req.disagg_kv_sender, CommonKVSender):
                return False
            reason = recv_req.reasons.get(req.bootstrap_room)
            if reason is None:
                return False
            # It may have failed here for a reason of its own. Decode is told when nothing is being written.
            req.disagg_kv_sender.fail_if_refused()
            req.disagg_kv_sender.fail(reason)
            req.disagg_kv_sender.poll()
            self._end_lost(req, reason)
            ended.append(req)
            return True

        ended: list[Req] = []
        lost = [req for req in self.waiting_queue if lose(req)]
        gone = set(map(id, lost))
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in gone]
        for req in lost:
            engine.release_req_to_metadata_buffer(req, self.req_to_metadata_buffer_idx_allocator)
            if self.enable_hicache_storage:
                self.tree_cache.release_aborted_request(req.rid)
            if req.mamba_pool_idx is not None:
                release_kv_cache(req, self.tree_cache, is_insert=False)
            if self.enable_metrics:
                # As for those that are polled.
                self.metrics_collector.increment_transfer_failed_reqs()
        for req in self._in_flight():
            if req is not self.chunked_req:
                # Its last chunk. With the result it comes to those that are polled.
                lose(req)
        req = self.chunked_req
        if lose(req):
            # From here on it is polled like those that are computed in full, and goes when nothing is being written.
            # Overlapped, a step in flight has a chunk of it, whose result is processed before that poll.
            self.chunked_req = None
            self.disagg_prefill_inflight_queue.append(req)
        _tell_once(self, ended)

    def _in_flight(self) -> list[Req]:
        """The requests of the step whose result has not been processed."""
        return [*self.last_batch.reqs] if self.enable_overlap and self.last_batch else []

    def _end_lost(self, req: Req, reason: str) -> None:
        """A request has failed: `_tell_once` tells its client. That it ends here again later, the engine does not."""
        message = f"Prefill transfer failed for request {req.rid}, room {req.bootstrap_room}: {reason}"
        logger.warning(message)
        status = HTTPStatus.BAD_REQUEST if reason.startswith(AT_FAULT) else HTTPStatus.INTERNAL_SERVER_ERROR
        prepare_abort(req, message, status_code=status)
        self._count_lost(req, reason)

    def _count_lost(self, req: Req, reason: str) -> None:
        events_of(self.server_args).ended(req.finished_reason)

    def process_batch_result_disagg_prefill(self, batch, result) -> None:
        """Alternatives of tokens are lists, as the engine expects; who got a token that its grammar rejects is told.

        The clients of prompts that have been computed are answered, see `_answer_computed`.
        """
        if result.copy_done is not None:
            result.copy_done.synchronize()
        output = result.logits_output
        for name in ("next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
            values = getattr(output, name, None) if batch.return_logprob else None
            if values:
                setattr(output, name, [v.tolist() if isinstance(v, torch.Tensor) else v for v in values])
        super().process_batch_result_disagg_prefill(batch, result)
        for req in batch.reqs:
            if req.output_ids and not req.finished() and getattr(req.to_finish, "status_code", 0) == 400:
                prepare_abort(req, req.to_finish.message, status_code=HTTPStatus.BAD_REQUEST)
                self.stream_output([req], req.return_logprob)
        self._answer_computed(batch.reqs)

    def _answer_computed(self, reqs: list[Req]) -> None:
        """Answer the clients of those of ``reqs`` whose prompt has been computed, if their decode has a radix cache.

        The engine answers when it finds, between two steps, that all KV has been sent. A gateway hands on no token of
        decode's before that. What fails from here on is decode's to report.
        """
        computed = [req for req in reqs if req.output_ids and not req.finished_output and _goes_well(req)]
        for req in computed:
            req.finished_reason, req.has_log_time_stats = FINISH_LENGTH(length=0), True
        _tell_once(self, computed)
        for req in computed:
            # Until its KV has been sent: its times are logged then.
            req.finished_reason, req.has_log_time_stats = None, False

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: int | None = None) -> None:
        """Wraps the engine's send: a cursor that only moves forward, and a last chunk that may carry no KV.

        A chunk that ends at or below the cursor sends nothing and leaves the cursor alone; the engine would move it
        back. When decode holds the whole prompt, the last chunk still brings the metadata and the state, if any.
        """
        page_size = self.token_to_kv_pool_allocator.page_size
        end = min(len(req.fill_ids), len(req.origin_input_ids)) if end_idx is None else end_idx
        if not last_chunk and end - end % page_size <= req.start_send_idx:
            return
        if not last_chunk and self.pp_size > 1 and self.launch_event is not None:
            # The last of several pipeline stages, with --pp-async-batch-depth, goes on without having waited for it.
            self.launch_event.synchronize()
        full_hit = last_chunk and req.start_send_idx >= end
        if not full_hit:
            super().send_kv_chunk(req, last_chunk, end_idx)
            return
        self.disagg_metadata_buffers.set_buf(req)
        req.disagg_kv_sender.send(np.empty(0, dtype=np.int32), self.state_of(req))

    def state_of(self, req: Req) -> list[int] | None:
        """What the engine sends beside KV with any last chunk, if a model has it; see `CommonKVManager.unfit`."""
        return None
