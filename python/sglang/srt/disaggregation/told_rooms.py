"""What one worker tells another of rooms: which number may be one, and what is remembered of it for a while.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

__all__ = ["ToldRooms", "is_room"]

Said = TypeVar("Said")


def is_room(room: Any) -> bool:
    """Whether ``room`` may be a request's. Room 0 is nobody's: it is that of health checks."""
    return isinstance(room, int) and not isinstance(room, bool) and 0 < room < 2**63


class ToldRooms(Generic[Said]):
    """What was said of rooms of late: of the last ``most``, for ``seconds``."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._said: dict[int | None, tuple[Said, float]] = {}

    def __len__(self) -> int:
        return len(self._said)

    def note(self, room: int, said: Said) -> None:
        """Remember it. The oldest is forgotten first."""
        self._said.pop(room, None)
        self._said[room] = said, time.monotonic() + self._seconds
        while len(self._said) > self._most:
            del self._said[next(iter(self._said))]

    def of(self, room: int | None) -> Said | None:
        """What was said of it, or None if nothing was of late."""
        said, until = self._said.get(room, (None, 0.0))
        return said if time.monotonic() < until else None

    def take(self, room: int | None) -> Said | None:
        """The same, and forget it."""
        said = self.of(room)
        self._said.pop(room, None)
        return said
