"""A worker with reads in flight is not idle.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Keeps KV in reads from a flush."""

    def is_fully_idle(self, for_health_check=False) -> bool:
        """False during reads, except for health checks."""
        return super().is_fully_idle(for_health_check) and (for_health_check or not self.has_reads())
