"""Scheduler of a prefill or decode worker that reports refusals, failures and aborts to the other worker.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.scheduler_abort_mixin import SchedulerAbortMixin
from sglang.srt.managers.scheduler_refusal_mixin import SchedulerRefusalMixin

__all__ = ["Scheduler"]


class Scheduler(SchedulerAbortMixin, SchedulerRefusalMixin, engine.Scheduler):
    """A scheduler that reports failures to its peer."""
