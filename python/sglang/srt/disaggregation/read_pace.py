"""Whether it is quicker to read KV from decode than to compute it, by how both went of late on this rank.

Over a slow link a read takes longer than what it spares, and one that is not over after two seconds has cost its
request these two for nothing.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict

__all__ = ["Pace", "ReadPaces"]

# Seconds after which what was seen counts half, and without a read, after which one is tried where they were slow.
HALF_LIFE_S, FORGOTTEN_S = 10.0, 60.0
# Tokens of the least step that tells what one of them takes, which is not what a step takes that has few.
LEAST_STEP = 256
# Decode ranks that are remembered.
MOST_PEERS = 1024


class Pace:
    """Tokens a second while there is something to do."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._until = -math.inf

    def note(self, tokens: int, began_at: float, ended_at: float) -> None:
        """So many ended at ``ended_at``; what began before others had ended shared their time."""
        busy = max(0.0, ended_at - max(began_at, self._until))
        half = 0.5 ** (max(0.0, ended_at - self._until) / HALF_LIFE_S) if self.is_known(ended_at) else 0.0
        self._tokens, self._seconds = self._tokens * half + tokens, self._seconds * half + busy
        self._until = max(self._until, ended_at)

    def is_known(self, now: float) -> bool:
        return now - self._until < FORGOTTEN_S

    def seconds(self, tokens: int) -> float:
        """What so many take by what was seen; 0 where nothing was, and infinite where nothing has ended."""
        return tokens * self._seconds / self._tokens if self._tokens else math.inf if self._seconds else 0.0


class ReadPaces:
    """The pace at which this rank computes prompts, and at which it reads from each decode rank."""

    def __init__(self, late_s: float) -> None:
        """late_s: seconds after which nobody waits for a read."""
        self._late_s = late_s
        self._computed = Pace()
        self._read: OrderedDict[str, Pace] = OrderedDict()

    def computed(self, tokens: int, began_at: float, ended_at: float) -> None:
        """A step over prompts has ended. Seconds of ``time.monotonic``, as everywhere here."""
        if tokens >= LEAST_STEP:
            self._computed.note(tokens, began_at, ended_at)

    def read(self, agent_name: str, tokens: int, began_at: float, ended_at: float) -> None:
        """A read has ended; with 0 tokens, it has not, but that long."""
        pace = self._read.setdefault(agent_name, Pace())
        self._read.move_to_end(agent_name)
        pace.note(tokens, began_at, ended_at)
        if len(self._read) > MOST_PEERS:
            self._read.popitem(last=False)

    def is_slow(self, agent_name: str, tokens: int, under_way: int) -> bool:
        """Whether computing ``tokens`` is the better choice, beside ``under_way`` that are being read from there.

        Where reads were slow and none has been seen for long, one is tried.
        """
        pace = self._read.get(agent_name)
        if pace is None:
            return False
        takes = pace.seconds(tokens + under_way)
        slow = takes > self._late_s or 0 < self._computed.seconds(tokens) < takes
        return slow and (under_way > 0 or pace.is_known(time.monotonic()))
