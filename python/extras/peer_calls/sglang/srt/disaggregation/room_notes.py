"""What one worker tells another of rooms: which number may be one, and what is remembered of it for a while.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

__all__ = ["RoomNotes", "is_room"]

# Rooms of which something is remembered, in each book; and seconds for which it is, of one that the other worker
# computes or knows of a rank for, whose request may be on its way.
MOST, REMEMBERED_S = 65536, 60.0

Note = TypeVar("Note")


def is_room(room: Any) -> bool:
    """Whether ``room`` may be a request's. Room 0 is nobody's: it is that of health checks."""
    return isinstance(room, int) and not isinstance(room, bool) and 0 < room < 2**63


class RoomNotes(Generic[Note]):
    """One note for each of the last `MOST` rooms, or rids, kept for ``seconds``."""

    def __init__(self, seconds: float = REMEMBERED_S) -> None:
        self._seconds = seconds
        self._notes: OrderedDict[int | str | None, tuple[Note, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, room: int | str, note: Note) -> None:
        """Remember it. The oldest is forgotten first."""
        # The package loads the overlays of its managers, which load this.
        from sglang.srt.disaggregation.common.rooms import remember

        remember(self._notes, room, (note, time.monotonic() + self._seconds), MOST)

    def of(self, room: int | str | None) -> Note | None:
        """The note on ``room``; None if there is none, or it has expired."""
        note, until = self._notes.get(room, (None, 0.0))
        return note if time.monotonic() < until else None

    def take(self, room: int | str | None) -> Note | None:
        """Remove and return the note on ``room``; None as in `of`."""
        note = self.of(room)
        self._notes.pop(room, None)
        return note
