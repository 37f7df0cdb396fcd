"""Scheduler of a prefill or decode worker: the other worker hears of what it refuses, loses or aborts.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.scheduler_abort_mixin import SchedulerAbortMixin
from sglang.srt.managers.scheduler_refusal_mixin import SchedulerRefusalMixin

__all__ = ["Scheduler"]


class Scheduler(SchedulerAbortMixin, SchedulerRefusalMixin, engine.Scheduler):
    """A scheduler that speaks of failures."""
