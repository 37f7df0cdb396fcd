"""Leak checks that count pages in reads.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler_runtime_checker_mixin as engine

__all__ = ["SchedulerRuntimeCheckerMixin"]


class SchedulerRuntimeCheckerMixin(engine.SchedulerRuntimeCheckerMixin):
    """Counts pages in reads."""

    def has_pages_out(self) -> bool:
        return super().has_pages_out() or self.has_reads()

    def has_reads(self) -> bool:
        """Whether a flush would free KV in reads: of a prefill, or offered by a decode worker. See decode_reads.py.

        On decode a flush keeps pages of requests in quarantine that prefill may write to, but not the offered prefix.
        """
        reads = getattr(getattr(self, "disagg_prefill_bootstrap_queue", None), "reads", None)
        if reads is not None:
            return len(reads) > 0
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        failed = () if queue is None else queue.quarantine
        return any(getattr(dr.kv_receiver, "offered", None) is not None for dr in failed)
