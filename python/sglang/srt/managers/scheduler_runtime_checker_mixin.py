"""Leak checks that know quarantine: pages of failed transfers are neither free nor a request's.

Upstream: sgl-project/sglang#35049 (merged), whose deferred release needs the same in its checks.
"""

from __future__ import annotations

from sglang.srt.disaggregation.decode_radix.hooks import has_work, hooks_of
from sglang.srt.managers import scheduler_runtime_checker_mixin as engine

__all__ = ["SchedulerRuntimeCheckerMixin"]


class SchedulerRuntimeCheckerMixin(engine.SchedulerRuntimeCheckerMixin):
    """Checks an idle worker for lost pages."""

    def self_check_during_idle(self) -> None:
        """Skips the leak check while pages are in quarantine or hooks have work.

        The check would report their pages as lost. KV events are still published: a quarantine may
        last for minutes. Adds the hook `idle`.
        """
        for idle in hooks_of(self).idle:
            idle()
        # The engine also calls this with local prompts left, once the requests they waited for
        # ended.
        if has_work(self) or self.has_pages_out():
            self._publish_kv_events()
        else:
            super().self_check_during_idle()

    def has_pages_out(self) -> bool:
        """Whether pages are neither free nor a request's. Extras may add theirs."""
        return self.has_quarantine()

    def has_quarantine(self) -> bool:
        """Whether prefill may still write to pages of failed requests."""
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return queue is not None and bool(queue.quarantine)
