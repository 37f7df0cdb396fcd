"""Scheduler of a worker that may have a tier: busy while KV is on its way, and flushed on all ranks alike.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.flush_agreement import begin_flush, check_pending_flush
from sglang.srt.mem_cache.tier import NO_TIER

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Knows of KV on its way to or from a tier, and flushes on all ranks alike."""

    # A flush that waits until no request is left, and until when, as the engine has it.
    _pending_flush: tuple[Any, float] | None = None

    def rests(self) -> bool:
        """Not while anything is on its way to or from a tier."""
        return super().rests() and not self._copies()

    def _copies(self) -> bool:
        return getattr(self.tree_cache, "tier", NO_TIER).busy

    def maybe_sleep_on_idle(self) -> None:
        """Does not sleep while KV is on its way to or from a tier."""
        if not self._copies():
            super().maybe_sleep_on_idle()

    def flush_cache_wrapped(self, recv_req):
        """Several TP ranks, or a worker with a tier, decide together."""
        if self._flushes_alone() or self._pending_flush is not None:
            return super().flush_cache_wrapped(recv_req)
        return begin_flush(self, recv_req, super().flush_cache_wrapped)

    def _check_pending_flush(self) -> None:
        """Several ranks look together whether the flush that waits can be done, and give it up together."""
        if self._pending_flush is None or self._flushes_alone():
            super()._check_pending_flush()
        else:
            check_pending_flush(self, super()._check_pending_flush)

    def _flushes_alone(self) -> bool:
        plain = self.disaggregation_mode == engine.DisaggregationMode.NULL and not hasattr(self.tree_cache, "tier")
        return plain or self.attn_tp_size == 1
