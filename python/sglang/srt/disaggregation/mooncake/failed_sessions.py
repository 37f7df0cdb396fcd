"""Which decode sessions a prefill rank writes nothing to, since a write has failed, and when it tries again.

The engine takes one failed write for the end of a session, until its decode worker registers anew, which it does when
it is restarted. A link that was down for a second would have all its requests fail until then.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FailedSessions"]

# Seconds until the first try after a failure, and the most between two. Each further failure doubles them: a write to
# a host that is gone may hold up a transfer thread for as long as the transport waits.
FIRST_S, MOST_S = 1.0, 60.0


@dataclass
class _Pause:
    """seconds: how long it is. until: by the clock; no end, where nothing is tried again."""

    seconds: float
    until: float


class FailedSessions:
    """In the place of the engine's set of that name: a session is in it while nothing is to be written to it.

    One of a decode worker with the flag comes out for one try at a time, and for good with a write that succeeds or
    when that worker registers anew. The engine asks and adds under its lock of sessions; the rest may come at any time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}
        self._tried_again: set[str] = set()

    def try_again(self, session: str) -> None:
        """From here on ``session`` is tried again after failures; of others the engine's rule stays."""
        self._tried_again.add(session)

    def add(self, session: str) -> None:
        """A write has failed."""
        if session not in self._tried_again:
            self._pauses[session] = _Pause(MOST_S, float("inf"))
            return
        before = self._pauses.get(session)
        seconds = FIRST_S if before is None else min(2 * before.seconds, MOST_S)
        self._pauses[session] = _Pause(seconds, self._clock() + seconds)

    def remove(self, session: str) -> None:
        """A write has succeeded, or its decode worker has registered anew. Of one that is not in here, nothing."""
        self._pauses.pop(session, None)

    def __contains__(self, session: str) -> bool:
        """Whether to write nothing. Who is told otherwise after a pause tries, and others wait for what comes of it."""
        pause = self._pauses.get(session)
        if pause is None:
            return False
        now = self._clock()
        if now < pause.until:
            return True
        pause.until = now + pause.seconds
        return False
