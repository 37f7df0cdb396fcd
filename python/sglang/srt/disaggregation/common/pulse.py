"""Whether a prefill worker has stood still: stopped, frozen with its container, or without a core.

Upstream: none is known.
"""

from __future__ import annotations

import math
import threading
import time

# Seconds between two beats; and between two that are no standstill.
BEAT_S, LATE_S = 0.25, 5.0
# Seconds after a standstill in which what had waited meanwhile has been read.
CATCH_UP_S = 3.0


class Pulse:
    """Beats for as long as the process runs, in a thread that waits for nothing else."""

    def __init__(self) -> None:
        # By the monotonic clock: the last beat (to come, before there was one), and the one before the last standstill.
        self._beat_at = math.inf
        self._stopped_at = 0.0
        # Seconds that it has run since then; of several standstills, since the first that was not caught up on.
        self._runs_s = CATCH_UP_S

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def _run(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_S)

    def beat(self) -> None:
        """The process runs."""
        now = time.monotonic()
        since = max(0.0, now - self._beat_at)
        if since <= LATE_S:
            self._runs_s += since
        elif self._runs_s >= CATCH_UP_S:
            self._stopped_at, self._runs_s = self._beat_at, 0.0
        self._beat_at = now

    def heard_until(self) -> float:
        """What was said to this worker before then, by the monotonic clock, has been read: now, or its last standstill.

        The thread that beats may go on later than who asks.
        """
        now = time.monotonic()
        beat_at = self._beat_at
        since = max(0.0, now - beat_at)
        stands_still = since > LATE_S
        if self._runs_s + (0.0 if stands_still else since) < CATCH_UP_S:
            return self._stopped_at
        return beat_at if stands_still else now

    def is_behind(self) -> bool:
        """Whether something may have been said to this worker that has not been read."""
        now = time.monotonic()
        return self.heard_until() < now
