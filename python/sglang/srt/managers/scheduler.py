"""Scheduler of a prefill or decode worker: its tree, aborts, in-flight batches and flushes.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.decode_radix.hooks import has_work, hooks_of
from sglang.srt.managers import io_struct
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.schedule_batch import keep_extra_key
from sglang.srt.mem_cache import cache_support, state_kind
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, build_tree
from sglang.srt.mem_cache.state_kind import StateKind

logger = logging.getLogger(__name__)

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Gives a decode worker its tree, reports whether it is idle, and flushes around quarantine.

    Methods of the engine's mixins are overridden in the modules of these.
    """

    # The engine's: a flush that waits until the worker is idle, and its deadline.
    _pending_flush: tuple[Any, float] | None = None

    # ---- the tree ----

    def init_cache_with_memory_pool(self) -> None:
        """Replaces the engine's radix cache by the decode tree if the flag is set."""
        args = self.server_args
        if not self.takes_decode_tree():
            super().init_cache_with_memory_pool()
            return
        kind = state_kind.kind_of(self.tp_worker.model_runner)
        if kind is not StateKind:
            cache_support.check(kind.support, args)
            # Makes the engine build its tree for KV only.
            self.tp_worker.get_memory_pool()[0].kv_alone = True
        # The engine must not build its own tier: the decode tree's tier is an extra's.
        self.enable_hierarchical_cache = self.enable_hicache_storage = False
        super().init_cache_with_memory_pool()
        self.tree_cache = build_tree(kind, self.tree_cache, self)

    def takes_decode_tree(self) -> bool:
        """Whether the worker gets the decode tree. An extra may say no and set its own tree."""
        return self.server_args.disaggregation_decode_enable_radix_cache

    def get_internal_state(self, recv_req):
        """Adds ``kv_pool``."""
        output = super().get_internal_state(recv_req)
        output.internal_state = {**output.internal_state, "kv_pool": self.kv_pool_state()}
        return output

    def kv_pool_state(self) -> dict[str, Any]:
        """Content of ``kv_pool``; extras add to it."""
        return {"idle": self.rests()}

    def rests(self) -> bool:
        """Whether the worker has no request and no page in quarantine."""
        return self.is_fully_idle() and not self.has_quarantine()

    def kv_manager(self):
        """The transfer backend's manager; None without disaggregation."""
        name = {
            engine.DisaggregationMode.PREFILL: "disagg_prefill_bootstrap_queue",
            engine.DisaggregationMode.DECODE: "disagg_decode_prealloc_queue",
        }.get(self.disaggregation_mode)
        return getattr(self, name).kv_manager if name else None

    # ---- new and aborted requests ----

    def handle_generate_request(self, recv_req) -> None:
        """Keeps ``extra_key``, which the engine drops, and lets an error end this request only.

        With the flag, prefixes of different keys (also given as ``cache_salt``) are not shared.
        """
        if hasattr(self.tree_cache, "tier"):
            keep_extra_key(recv_req)
        try:
            super().handle_generate_request(recv_req)
        except Exception as e:
            self.refuse_message(recv_req, e)

    def refuse_message(self, recv_req, error: Exception) -> str:
        """Answer status 400 to a request that cannot be served. All ranks get the same message."""
        reason = f"The request cannot be served: {type(error).__name__}: {error}"
        logger.error("Request %s", recv_req.rid, exc_info=error)
        finished = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": reason}
        self.send_to_tokenizer.send_output(
            io_struct.AbortReq(rid=recv_req.rid, finished_reason=finished), recv_req
        )
        return reason

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Adds two cases that the engine misses.

        A pause in mode ``retract`` requeues decode requests without ``is_retracted``. They would
        start another handshake with a prefill that has finished them, and wait forever.

        With priorities, prefill and decode (with the flag) sort the queue by priority. A request
        without one, such as a warm-up, would end the worker: it gets the lowest.
        """
        decodes = isinstance(self.tree_cache, DecodeRadixCache)
        is_retracted = is_retracted or (decodes and req.is_retracted)
        if self.enable_priority_scheduling:
            if decodes or self.disaggregation_mode == engine.DisaggregationMode.PREFILL:
                self._set_or_validate_priority(req)
        super()._add_request_to_queue(req, is_retracted)

    def abort_request(self, recv_req) -> None:
        """An abort in prefill's waiting queue also fails the transfer: decode waits for it."""
        rid, everything = recv_req.rid, recv_req.abort_all or not recv_req.rid
        self._abort(recv_req, lambda req: everything or req.rid.startswith(rid))

    def _abort(self, recv_req: Any, matches: Callable[[Any], bool]) -> None:
        prefill = self.disaggregation_mode == engine.DisaggregationMode.PREFILL
        aborted = [req for req in self.waiting_queue if matches(req)] if prefill else []
        super().abort_request(recv_req)
        for req in aborted:
            if isinstance(req.disagg_kv_sender, CommonKVSender):
                req.disagg_kv_sender.abort()
                req.disagg_kv_sender.poll()

    # ---- steps ----

    def process_batch_result(self, batch, result) -> None:
        """Adds the hook `note_step`."""
        super().process_batch_result(batch, result)
        for note_step in hooks_of(self).note_step:
            note_step(batch, result)

    def update_running_batch(self, batch):
        """On decode, processes a final in-flight batch before a request is retracted.

        A retraction saves KV of processed tokens only. After a resume the token of the in-flight
        batch is computed again, which a final batch (`is_final`) does not allow.
        """
        steps = getattr(self, "result_queue", None)
        if (
            steps
            and self.disaggregation_mode == engine.DisaggregationMode.DECODE
            and self.is_final(steps[-1][0])
            and (engine.TEST_RETRACT or not batch.check_decode_mem())
        ):
            self._end_step()
        return super().update_running_batch(batch)

    def is_final(self, batch) -> bool:
        """Whether the step of an in-flight ``batch`` cannot be repeated. An extra may say so."""
        return False

    def is_fully_idle(self, for_health_check=False) -> bool:
        """Not idle while hooks have work, such as a prompt to compute."""
        return super().is_fully_idle(for_health_check) and not has_work(self)

    def end_step_of_none(self) -> None:
        """With the decode tree, process the in-flight batch if all its requests have ended."""
        steps = (
            getattr(self, "result_queue", None)
            if isinstance(self.tree_cache, DecodeRadixCache)
            else None
        )
        if steps and all(req.finished() for req in steps[-1][0].reqs):
            self._end_step()
            self.running_batch.filter_batch()

    def _end_step(self) -> None:
        """Process the result of the in-flight batch now; the event loop then finds none."""
        self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = self.cur_batch = None

    # ---- flushes ----

    def flush_cache(self) -> bool:
        """Keeps pages in quarantine, and does not fail for an in-flight batch of ended requests.

        A weight update may follow the last answer at once; a failed flush ends the scheduler.
        """
        self.end_step_of_none()
        if not self.has_quarantine() or not self.is_fully_idle():
            return super().flush_cache()
        self.cur_batch = self.last_batch = None
        self.tree_cache.empty([dr.req for dr in self.disagg_decode_transfer_queue.quarantine])
        self.reset_metrics()
        return True

    def flush_cache_wrapped(self, recv_req):
        """With several TP ranks, all flush or none, also if one alone is busy: trees stay alike."""
        if self._flushes_alone() or self._pending_flush is not None:
            return super().flush_cache_wrapped(recv_req)
        if recv_req.timeout_s and recv_req.timeout_s > 0:
            self._pending_flush = recv_req, time.monotonic() + recv_req.timeout_s
            return None
        self.end_step_of_none()
        (idle,) = self._said_by_all(self.is_fully_idle())
        flushed = super().flush_cache_wrapped
        return flushed(recv_req) if idle else io_struct.FlushCacheReqOutput(success=False)

    def _check_pending_flush(self) -> None:
        """With several TP ranks, all flush, or give up, in the same step, whatever their clocks."""
        if self._pending_flush is None or self._flushes_alone():
            super()._check_pending_flush()
            return
        recv_req, deadline = self._pending_flush
        idle, in_time = self._said_by_all(self.is_fully_idle(), time.monotonic() < deadline)
        if idle:
            super()._check_pending_flush()
        elif not in_time:
            self._pending_flush = None
            answer = io_struct.FlushCacheReqOutput(
                success=False, message="Requests were left until the time was up."
            )
            self.send_to_tokenizer.send_output(answer, recv_req)

    def _said_by_all(self, *said: bool) -> list[int]:
        """Per flag: 1 if it is true on all ranks, else 0."""
        state = torch.tensor([int(yes) for yes in said])
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=self.attn_tp_cpu_group)
        return state.tolist()

    def _flushes_alone(self) -> bool:
        mode, plain = self.disaggregation_mode, engine.DisaggregationMode.NULL
        return self.attn_tp_size == 1 or (mode == plain and not hasattr(self.tree_cache, "tier"))
