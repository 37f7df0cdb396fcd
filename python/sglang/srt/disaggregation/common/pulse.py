"""Whether a prefill worker has stood still: stopped, frozen with its container, or without a core.

Upstream: none is known.
"""

from __future__ import annotations

import threading
import time

# Seconds between two beats; and between two that are no standstill.
BEAT_S, LATE_S = 0.25, 5.0
# Seconds after a standstill in which what had waited meanwhile has been read.
CATCH_UP_S = 3.0


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
        if self._stands_still(now):
            self._stopped_at, self._woke_at = self._before_it(), now
        self._beat_at = now

    def heard_until(self) -> float:
        """What was said to this worker before then, by the monotonic clock, has been read: now, or its last standstill.

        The thread that beats may go on later than who asks.
        """
        now = time.monotonic()
        if self._stands_still(now):
            return self._before_it()
        return self._stopped_at if now - self._woke_at < CATCH_UP_S else now

    def _stands_still(self, now: float) -> bool:
        return self._beat_at is not None and now - self._beat_at > LATE_S

    def _before_it(self) -> float:
        """The last beat; of two standstills with nothing read between them, the one before the first."""
        assert self._beat_at is not None
        return self._stopped_at if self._beat_at - self._woke_at < CATCH_UP_S else self._beat_at
