"""Runs postponed weight updates in the event loop.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Scheduler whose weight updates wait until no request is left."""

    def process_input_requests(self, recv_reqs) -> None:
        """Adds, once per turn of every event loop, postponed weight updates."""
        super().process_input_requests(recv_reqs)
        self.update_if_idle(recv_reqs)

    def maybe_sleep_on_idle(self) -> None:
        """Does not sleep while an update is postponed."""
        if not self.postponed_updates:
            super().maybe_sleep_on_idle()
