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
        """Puts the leak check off while pages are in quarantine, or read, or a prompt waits to be computed here.

        It would report them as lost. The KV events that go with it are published all the same: a quarantine may last
        for minutes. Adds that the time without a step is no step's.
        """
        for idle in hooks_of(self).idle:
            idle()
        # A turn without a step need not be idle: those that decoded have ended, and the prompts waited for them.
        if has_work(self) or self.has_quarantine() or self.has_reads():
            self._publish_kv_events()
        else:
            super().self_check_during_idle()

    def has_quarantine(self) -> bool:
        """Whether a prefill may still write to pages of requests that have failed."""
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return queue is not None and bool(queue.quarantine)

    def has_reads(self) -> bool:
        """Whether a flush would take away what is read from decode, by a prefill, or what may be, on a decode worker.

        There, of a request in quarantine, a flush keeps what prefill may write to. The prefix that it may read goes
        with the tree. See decode_reads.py.
        """
        reads = getattr(getattr(self, "disagg_prefill_bootstrap_queue", None), "reads", None)
        if reads is not None:
            return len(reads) > 0
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        failed = () if queue is None else queue.quarantine
        return any(getattr(dr.kv_receiver, "offered", None) is not None for dr in failed)
