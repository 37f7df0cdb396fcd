"""Whether a prefill worker has stood still: stopped, frozen with its container, or without a core.

Upstream: none is known.
"""

from __future__ import annotations

import threading
import time

# Seconds between two beats.
BEAT_S = 0.25
# Seconds between two beats that are no standstill, and in which what had waited has been read after one.
LATE_S, CATCH_UP_S = 2.0, 10.0


class Pulse:
    """Beats for as long as the process runs, in a thread that waits for nothing else."""

    def __init__(self) -> None:
        # By the monotonic clock. The last beat, the one before the last standstill, and the first one after it.
        self._beat_at: float | None = None
        self._stopped_at = self._woke_at = float("-inf")

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
        if self._beat_at is not None and now - self._beat_at > LATE_S:
            self._stopped_at, self._woke_at = self._beat_at, now
        self._beat_at = now

    def heard_all_until(self) -> float:
        """What was said to this worker before then, by the monotonic clock, has been read: now, or its last standstill.

        The thread that beats may go on later than who asks.
        """
        now = time.monotonic()
        if self._beat_at is not None and now - self._beat_at > LATE_S:
            return self._beat_at
        return self._stopped_at if now - self._woke_at < CATCH_UP_S else now
