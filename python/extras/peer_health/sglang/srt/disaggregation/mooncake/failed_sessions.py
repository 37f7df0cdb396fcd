"""Decode sessions that a prefill rank does not write to after a failed write, and when it tries again.

In the engine one failed write ends a session until its decode worker registers anew, which it does at a restart. After
a link failure of one second all its requests would fail until then.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FailedSessions"]

# First and longest pause, seconds. A failure soon after a pause doubles the next: a write to a lost host may block a
# transfer thread until the transport's time-out.
FIRST_S, MOST_S = 1.0, 60.0
# Bound of the sessions that are retried: each restart of a decode worker adds new ones.
REMEMBERED = 1024


@dataclass
class _Pause:
    """seconds: its length. until: its end, monotonic; infinity for sessions that are not retried."""

    seconds: float
    until: float


class FailedSessions:
    """Replaces the engine's set of that name: contains a session while nothing is to be written to it.

    Sessions of decode workers with the flag return after a pause, others when they register anew. Only failures count:
    the engine has several paths for successes, and some cannot be observed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}
        # Least recently used first.
        self._tried_again: OrderedDict[str, None] = OrderedDict()

    def try_again(self, session: str) -> None:
        """Retry ``session`` after failures from now on; for others the engine's rule stays."""
        self._tried_again[session] = None
        self._tried_again.move_to_end(session)
        if len(self._tried_again) > REMEMBERED:
            self._tried_again.popitem(last=False)

    def add(self, session: str) -> None:
        """A write has failed. Of several concurrent writes only the first counts."""
        now = self._clock()
        # A copy in one go: another thread may remove one.
        for other, pause in list(self._pauses.items()):
            if now > pause.until + MOST_S:
                # The next failure counts as a first one.
                self._pauses.pop(other, None)
        before = self._pauses.get(session)
        if session not in self._tried_again:
            self._pauses[session] = _Pause(MOST_S, float("inf"))
        elif before is None:
            self._pauses[session] = _Pause(FIRST_S, now + FIRST_S)
        elif now >= before.until:
            seconds = min(2 * before.seconds, MOST_S)
            self._pauses[session] = _Pause(seconds, now + seconds)

    def remove(self, session: str) -> None:
        """Its decode worker has registered anew. No-op for unknown sessions."""
        self._pauses.pop(session, None)

    def __contains__(self, session: str) -> bool:
        """Whether nothing may be written to it now."""
        pause = self._pauses.get(session)
        return pause is not None and self._clock() < pause.until
