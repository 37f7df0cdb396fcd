"""Admission by targets for ITL and TTFT; see itl_gate.py, ttft_target.py and ttft_refusal.py.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.decode_radix.schedule import priority_sign
from sglang.srt.disaggregation.itl_gate import ItlHooks
from sglang.srt.disaggregation.ttft_refusal import FINISH_REFUSED, RefusalHooks, TtftRefusal
from sglang.srt.disaggregation.ttft_target import LATE_INTERVAL, LateLines, TtftHooks, TtftTarget
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

__all__ = ["DecodePreallocQueue", "DecodeTransferQueue"]

hooks.register(hooks.DecodeHooks, ItlHooks.of)
hooks.register(hooks.DecodeHooks, TtftHooks.of)
hooks.register(hooks.DecodeHooks, RefusalHooks.of)


class LatePolicy(engine.DecodeTransferQueue.policy_type):  # type: ignore[misc, name-defined]
    """With a target for TTFT, requests that are late have a line of their own; see `PrefixPolicy.split`."""

    late: LateLines | None = None

    def split(self, entries: Any) -> Any:
        return super().split(entries) if self.late is None else self.late.split(entries)

    def is_second(self, entry: Any) -> bool:
        return self.late is not None and self.late.is_second(entry)


class LateSchedule(engine.DecodePreallocQueue.schedule_type):  # type: ignore[misc, name-defined]
    """With a target for TTFT, requests that are late go last, but for some."""

    def window(self, queue: Any) -> Any:
        if (late := self._policy.late) is not None:
            late.begin_step(queue[0].entry if queue else None)
        return super().window(queue)

    def _ready(self, queue: Any) -> Any:
        ready, late = super()._ready(queue), self._policy.late
        return ready if late is None else late.looked_at(ready)

    def _order(self, window: Any) -> Any:
        order, late = super()._order(window), self._policy.late
        return order if late is None else late.mix(order, window.entries)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Holds the TTFT target, if any."""

    policy_type = LatePolicy
    ttft_target: TtftTarget | None = None
    ttft_refusal: TtftRefusal | None = None


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """With ``refuse``: refuses requests whose first token would be too late."""

    schedule_type = LateSchedule

    def _init_radix(self, tree: Any) -> None:
        super()._init_radix(tree)
        if (target := self.transfer_queue.ttft_target) is not None:
            target.alone = self.ranks.size == 1
            self.admission.look_every = LATE_INTERVAL

    def add(self, req: Req, is_retracted: bool = False) -> None:
        """Answers 503 to a refused request and has prefill abort it; the same on all ranks."""
        refusal = self.transfer_queue.ttft_refusal
        if refusal is not None and not is_retracted and (end := self._refused(req, refusal)) is not None:
            prepare_abort(req, end.message)
            req.finished_reason = end
            self.scheduler.stream_output([req], req.return_logprob)
            # Defined by the extra failure_reports.
            self.scheduler._tell_peer(req, end.message)
            return
        super().add(req, is_retracted)

    def _refused(self, req: Req, refusal: TtftRefusal) -> FINISH_REFUSED | None:
        """The finish reason if ``req`` is refused. Never a second request of a live room: prefill has one half only."""
        if is_warmup(req) or req.finished() or req.to_finish is not None or req.bootstrap_room in self.rooms:
            return None
        sign = priority_sign(self.scheduler)
        return refusal.refuses(sign * req.priority if sign else 0)
