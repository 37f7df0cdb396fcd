"""Prefill answers clients at once after a prompt is computed or fails, and stops computing failed requests.

Upstream: none is known.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.common.delta_sender import AT_FAULT, names_prefix
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.lost_requests import LostReqs, maybe_lost
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

__all__ = ["PrefillBootstrapQueue", "SchedulerDisaggregationPrefillMixin"]


@contextlib.contextmanager
def _told_at_once(scheduler: Scheduler) -> Iterator[None]:
    """Collects the engine's answers to failed requests into one message: each output scans all waiting requests."""
    told: list[Req] = []
    send = scheduler.stream_output
    scheduler.stream_output = lambda reqs, *_: told.extend(reqs)
    try:
        yield
    finally:
        scheduler.stream_output = send
        scheduler.tell_once(told)


def _goes_well(req: Req) -> bool:
    """Whether a request, which a decode worker with a radix cache has asked for, has not failed."""
    sender = req.disagg_kv_sender
    if req.finished() or req.to_finish is not None or not isinstance(sender, CommonKVSender):
        return False
    manager = sender.kv_mgr
    if manager.pp_size > 1 or getattr(manager.server_args, "tokenizer_worker_num", 1) > 1:
        # The last stage, or the process that ends the worker, does not know which KV is still being sent.
        return False
    return not sender.has_failed() and names_prefix(sender.state.asked.values())


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Sends the answers of all requests that fail in one step together."""

    def pop_and_answer(self, *args):
        """Sends all answers in one message; sending may change the status that is counted afterwards."""
        with _told_at_once(self.scheduler):
            return super().pop_and_answer(*args)


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Answers clients of computed prompts, and ends requests that failed earlier."""

    def process_disagg_prefill_inflight_queue(self, *args, **kwargs):
        """Adds the log of times, which the engine skips for clients that were answered before."""
        done = super().process_disagg_prefill_inflight_queue(*args, **kwargs)
        for req in done:
            if self.attn_tp_rank == 0 and self.server_args.enable_request_time_stats_logging:
                req.log_time_stats()
        return done

    def settle(self) -> None:
        """Answers clients of failed requests at once. Memory of writes in flight is held until they end."""
        super().settle()
        if not isinstance(self.disagg_prefill_bootstrap_queue.kv_manager, CommonKVManager):
            return
        computing = getattr(self, "chunked_req", None)
        if computing is not None and isinstance(computing.disagg_kv_sender, CommonKVSender):
            # A send of its chunks may fail on one rank only: decode is notified, and notifies the others.
            computing.disagg_kv_sender.poll()
        lost: list[Req] = []
        for req in self.disagg_prefill_inflight_queue:
            sender = req.disagg_kv_sender
            if isinstance(sender, CommonKVSender) and sender.has_failed() and not req.finished():
                self._end_lost(req, sender.failure_reason())
                lost.append(req)
        self.tell_once(lost)

    def lost_requests(self) -> dict[int, str]:
        """Failure reasons that this rank knows, by room, of requests that no queue polls.

        These wait for computation, or a part of them is being computed.
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
        """End these requests in the same step on all ranks, and compute no more for them."""

        def lose(req: Req | None) -> bool:
            if req is None or not isinstance(req.disagg_kv_sender, CommonKVSender):
                return False
            reason = recv_req.reasons.get(req.bootstrap_room)
            if reason is None:
                return False
            # This rank may know another reason. Decode is notified once no write is in flight.
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
                # As for polled requests.
                self.metrics_collector.increment_transfer_failed_reqs()
        for req in self._in_flight():
            if req is not self.chunked_req:
                # Its last chunk: after the result it joins the polled requests.
                lose(req)
        req = self.chunked_req
        if lose(req):
            # From now on it is polled like computed requests, and released once no write is in flight. With overlap,
            # the result of a step in flight with a chunk of it is processed before that poll.
            self.chunked_req = None
            self.disagg_prefill_inflight_queue.append(req)
        self.tell_once(ended)

    def _in_flight(self) -> list[Req]:
        """Requests of the step whose result is not processed yet."""
        return [*self.last_batch.reqs] if self.enable_overlap and self.last_batch else []

    def _end_lost(self, req: Req, reason: str) -> None:
        """Fail a request; `tell_once` answers its client. The engine, which ends it later, does not answer again."""
        message = f"Prefill transfer failed for request {req.rid}, room {req.bootstrap_room}: {reason}"
        logger.warning(message)
        status = HTTPStatus.BAD_REQUEST if reason.startswith(AT_FAULT) else HTTPStatus.INTERNAL_SERVER_ERROR
        prepare_abort(req, message, status_code=status)
        self._count_lost(req, reason)

    def _count_lost(self, req: Req, reason: str) -> None:
        events_of(self.server_args).ended(req.finished_reason)

    def tell_once(self, reqs: list[Req]) -> None:
        """Answer the clients of these requests in one message: each output scans all waiting requests for its load."""
        if reqs:
            self.stream_output(reqs, any(req.return_logprob for req in reqs))

    def process_batch_result_disagg_prefill(self, batch, result) -> None:
        """Adds answers to the clients of computed prompts."""
        super().process_batch_result_disagg_prefill(batch, result)
        self._answer_computed(batch.reqs)

    def _answer_computed(self, reqs: list[Req]) -> None:
        """Answer clients of computed prompts in ``reqs``, if their decode worker has a radix cache.

        The engine answers only when it finds, between two steps, that all KV has been sent. A gateway holds decode's
        tokens back until then. Failures from here on are decode's to report.
        """
        computed = [req for req in reqs if req.output_ids and not req.finished_output and _goes_well(req)]
        for req in computed:
            req.finished_reason, req.has_log_time_stats = FINISH_LENGTH(length=0), True
        self.tell_once(computed)
        for req in computed:
            # Until its KV has been sent; its times are logged then.
            req.finished_reason, req.has_log_time_stats = None, False
