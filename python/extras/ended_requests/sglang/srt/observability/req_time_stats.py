"""Sends a request's time stamps to the process that records it.

Upstream: none is known.
"""

from __future__ import annotations

import os

from sglang.srt.observability import req_time_stats as engine
from sglang.srt.observability import request_life

__all__ = ["SchedulerReqTimeStats"]


class SchedulerReqTimeStats(engine.SchedulerReqTimeStats):
    """Request times that are sent with all stamps if requests are recorded."""

    # Time of each stage as received from the scheduler; in other processes only.
    life: dict[str, float] | None = None

    # Each message of each request is pickled, so this is defined only if requests are recorded.
    if os.environ.get(request_life.VARIABLE):

        def __getstate__(self) -> dict:
            """Adds all stamps: the engine's scheduler sends five, its detokenizer none."""
            state = super().__getstate__()
            if not request_life.remembers():
                return state
            life = self.life
            if life is None:
                life = request_life.stamps(self, request_life.SCHEDULER_STAGES, engine.global_diff_realtime_monotonic)
            return {**state, "life": life}
