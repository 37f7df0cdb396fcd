"""Leak checks that know of reads: what is being read is neither free nor a request's.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler_runtime_checker_mixin as engine

__all__ = ["SchedulerRuntimeCheckerMixin"]


class SchedulerRuntimeCheckerMixin(engine.SchedulerRuntimeCheckerMixin):
    """Checks an idle worker for lost pages."""

    def has_pages_out(self) -> bool:
        """Adds what is read."""
        return super().has_pages_out() or self.has_reads()

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
