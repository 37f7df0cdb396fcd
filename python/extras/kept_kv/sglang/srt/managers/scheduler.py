"""Scheduler of a worker that may have a tier: busy while KV is on its way.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache.tier import NO_TIER

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Knows of KV on its way to or from a tier."""

    def rests(self) -> bool:
        """Not while anything is on its way to or from a tier."""
        return super().rests() and not self._copies()

    def _copies(self) -> bool:
        return getattr(self.tree_cache, "tier", NO_TIER).busy

    def maybe_sleep_on_idle(self) -> None:
        """Does not sleep while KV is on its way to or from a tier."""
        if not self._copies():
            super().maybe_sleep_on_idle()
