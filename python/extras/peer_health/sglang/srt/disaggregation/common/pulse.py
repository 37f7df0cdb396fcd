"""Whether a prefill worker has stood still: stopped, frozen with its container, or without a core.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time

# Seconds between two beats that are no standstill.
LATE_S = 5.0
# Seconds after a standstill in which what had waited meanwhile has been read.
CATCH_UP_S = 3.0


class Pulse:
    """Beats for as long as the process runs: the thread that looks after peers has it beat."""

    def __init__(self) -> None:
        # By the monotonic clock: the last beat (to come, before there was one), the one before the last standstill (of
        # several that were not caught up on, the first), and when that will have been caught up on.
        self._beat_at = math.inf
        self._stopped_at = self._caught_up_at = 0.0

    def beat(self) -> None:
        """The process runs."""
        now = time.monotonic()
        if now - self._beat_at > LATE_S:
            if self._beat_at >= self._caught_up_at:
                self._stopped_at = self._beat_at
            self._caught_up_at = now + CATCH_UP_S
        self._beat_at = now

    def heard_until(self) -> float:
        """What was said to this worker before then, by the monotonic clock, has been read: now, or its last standstill.

        The thread that beats may go on later than who asks.
        """
        now, beat_at = time.monotonic(), self._beat_at
        if now - beat_at > LATE_S:
            now = beat_at
        return self._stopped_at if now < self._caught_up_at else now
