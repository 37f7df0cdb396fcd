"""The simulated clock and what is to happen when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


class Clock:
    """Seconds since the simulation began, and the events to come, in order of time and then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._told = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call ``do`` at ``when`` seconds, at once if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._count), do))

    def after(self, delay: float, do: Callable[[], None]) -> None:
        """Call ``do`` in ``delay`` seconds."""
        self.at(self.now + delay, do)

    def run_next(self) -> bool:
        """Go to the next event and let it happen; False when there is none."""
        if not self._events:
            return False
        self.now, _, do = heapq.heappop(self._events)
        do()
        return True

    def monotonic(self) -> float:
        """What ``time.monotonic`` returns meanwhile.

        As of the real one, no two readings are equal: the tree orders its nodes by them.
        """
        self._told = max(self.now, self._told + 1e-9)
        return self._told

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The worker's code reads this clock and not the machine's."""
        with mock.patch("time.monotonic", self.monotonic):
            yield
