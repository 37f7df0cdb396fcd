"""Leak checks that know of quarantine: pages of failed transfers are neither free nor a request's.

Upstream: sgl-project/sglang#35049 (merged), whose deferred release the checks have to know too.
"""

from __future__ import annotations

from sglang.srt.disaggregation.decode_radix.hooks import has_work, hooks_of
from sglang.srt.managers import scheduler_runtime_checker_mixin as engine

__all__ = ["SchedulerRuntimeCheckerMixin"]


class SchedulerRuntimeCheckerMixin(engine.SchedulerRuntimeCheckerMixin):
    """Checks an idle worker for lost pages."""

    def self_check_during_idle(self) -> None:
        """Puts the leak check off while pages are in quarantine, or a prompt waits to be computed here.

        It would report them as lost. The KV events that go with it are published all the same: a quarantine may last
        for minutes. Adds that the time without a step is no step's.
        """
        for idle in hooks_of(self).idle:
            idle()
        # A turn without a step need not be idle: those that decoded have ended, and the prompts waited for them.
        if has_work(self) or self.has_pages_out():
            self._publish_kv_events()
        else:
            super().self_check_during_idle()

    def has_pages_out(self) -> bool:
        """Whether pages are neither free nor a request's. An extra may have such ones too."""
        return self.has_quarantine()

    def has_quarantine(self) -> bool:
        """Whether a prefill may still write to pages of requests that have failed."""
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return queue is not None and bool(queue.quarantine)
