"""Which decode sessions a prefill rank writes nothing to, since a write has failed, and when it tries again.

The engine takes one failed write for the end of a session, until its decode worker registers anew, which it does when
it is restarted. A link that was down for a second would have all its requests fail until then.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FailedSessions"]

# Seconds until it is tried again after a failure, and the most. Each that comes soon after a pause doubles the next: a
# write to a host that is gone may hold up a transfer thread for as long as the transport waits.
FIRST_S, MOST_S = 1.0, 60.0
# Sessions that are tried again: each restart of a decode worker brings others.
REMEMBERED = 1024


@dataclass
class _Pause:
    """seconds: how long it is. until: by the clock; no end, where nothing is tried again."""

    seconds: float
    until: float


class FailedSessions:
    """In the place of the engine's set of that name: a session is in it while nothing is to be written to it.

    One of a decode worker with the flag comes out after a pause, and others when that worker registers anew. It goes by
    failures alone: of what succeeds the engine has several ways, of which some are nobody's to hear of.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}
        # The one that was last written to comes last.
        self._tried_again: OrderedDict[str, None] = OrderedDict()

    def try_again(self, session: str) -> None:
        """From here on ``session`` is tried again after failures; of others the engine's rule stays."""
        self._tried_again[session] = None
        self._tried_again.move_to_end(session)
        if len(self._tried_again) > REMEMBERED:
            self._tried_again.popitem(last=False)

    def add(self, session: str) -> None:
        """A write has failed. Of several that were under way together the first counts."""
        now = self._clock()
        # A copy in one go: another thread may remove one.
        for other, pause in list(self._pauses.items()):
            if now > pause.until + MOST_S:
                # Over for so long that the next failure is a first one.
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
        """Its decode worker has registered anew. Of one that is not in here, nothing."""
        self._pauses.pop(session, None)

    def __contains__(self, session: str) -> bool:
        """Whether to write nothing."""
        pause = self._pauses.get(session)
        return pause is not None and self._clock() < pause.until
