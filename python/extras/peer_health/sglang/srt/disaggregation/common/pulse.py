"""Detects stalls of a prefill worker: stopped, frozen with its container, or without a core.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time

# A longer interval between two beats, seconds, is a stall.
LATE_S = 5.0
# Seconds after a stall until the messages of that time have been read.
CATCH_UP_S = 3.0


class Pulse:
    """Detects stalls by the beats of the monitoring thread."""

    def __init__(self) -> None:
        # Monotonic times. The last beat, infinity before the first; the beat before the last stall (of several without
        # a full catch-up, the first); and the end of its catch-up.
        self._beat_at = math.inf
        self._stopped_at = self._caught_up_at = 0.0

    def beat(self) -> None:
        """Note that the process runs."""
        now = time.monotonic()
        if now - self._beat_at > LATE_S:
            if self._beat_at >= self._caught_up_at:
                self._stopped_at = self._beat_at
            self._caught_up_at = now + CATCH_UP_S
        self._beat_at = now

    def heard_until(self) -> float:
        """All messages before this time (monotonic) have been read: now, or the start of the last stall.

        Right after a stall the caller may run before the thread that beats.
        """
        now, beat_at = time.monotonic(), self._beat_at
        if now - beat_at > LATE_S:
            now = beat_at
        return self._stopped_at if now < self._caught_up_at else now
