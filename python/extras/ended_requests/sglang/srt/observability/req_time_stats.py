"""A request's time stamps go to the process that remembers it.

Upstream: none is known.
"""

from __future__ import annotations

import os

from sglang.srt.observability import req_time_stats as engine
from sglang.srt.observability import request_life

__all__ = ["SchedulerReqTimeStats"]


class SchedulerReqTimeStats(engine.SchedulerReqTimeStats):
    """Request times that tell all stamps where these are kept."""

    # When each stage was reached, as the scheduler has told it; in other processes.
    life: dict[str, float] | None = None

    # Each message of each request is pickled: where nothing is remembered, that is the engine's alone.
    if os.environ.get(request_life.VARIABLE):

        def __getstate__(self) -> dict:
            """Adds all stamps where a worker remembers them: the engine sends five, and its detokenizer none."""
            state = super().__getstate__()
            if not request_life.remembers():
                return state
            life = self.life
            if life is None:
                life = request_life.stamps(self, request_life.SCHEDULER_STAGES, engine.global_diff_realtime_monotonic)
            return {**state, "life": life}
