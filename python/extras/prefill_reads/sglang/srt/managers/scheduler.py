"""A worker that reads KV from another, or is read from, is not idle.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Flushes nothing that is being read."""

    def is_fully_idle(self, for_health_check=False) -> bool:
        """A worker that reads from another or may be read from is not idle."""
        return super().is_fully_idle(for_health_check) and (for_health_check or not self.has_reads())
