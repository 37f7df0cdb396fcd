"""Admission by targets for ITL and TTFT; see itl_gate.py, ttft_target.py and ttft_refusal.py.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.decode_radix.schedule import priority_sign
from sglang.srt.disaggregation.itl_gate import ItlHooks
from sglang.srt.disaggregation.ttft_refusal import FINISH_REFUSED, RefusalHooks, TtftRefusal
from sglang.srt.disaggregation.ttft_target import TtftHooks, TtftTarget
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

__all__ = ["DecodePreallocQueue", "DecodeTransferQueue"]

hooks.register(hooks.DecodeHooks, ItlHooks.of)
hooks.register(hooks.DecodeHooks, TtftHooks.of)
hooks.register(hooks.DecodeHooks, RefusalHooks.of)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Holds the TTFT target, if any."""

    ttft_target: TtftTarget | None = None
    ttft_refusal: TtftRefusal | None = None


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """With ``refuse``: refuses requests whose first token would be too late."""

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
