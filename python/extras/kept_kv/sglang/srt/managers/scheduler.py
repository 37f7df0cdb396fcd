"""A scheduler with copies to or from a tier is busy.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache.tier import NO_TIER

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Busy during copies to or from a tier."""

    def rests(self) -> bool:
        """False during copies."""
        return super().rests() and not self._copies()

    def _copies(self) -> bool:
        return getattr(self.tree_cache, "tier", NO_TIER).busy

    def maybe_sleep_on_idle(self) -> None:
        """Does not sleep during copies."""
        if not self._copies():
            super().maybe_sleep_on_idle()
