"""Notes on rooms from another worker, kept for a limited time.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

__all__ = ["RoomNotes", "is_room"]

# Notes in each table; seconds for which a note is kept on a room that the other worker computes, or whose rank it
# knows: its request may not have arrived yet.
MOST, REMEMBERED_S = 65536, 60.0

Note = TypeVar("Note")


def is_room(room: Any) -> bool:
    """Whether ``room`` is a valid room of a request. Room 0 is for health checks."""
    return isinstance(room, int) and not isinstance(room, bool) and 0 < room < 2**63


class RoomNotes(Generic[Note]):
    """One note for each of the last `MOST` rooms, or rids, kept for ``seconds``."""

    def __init__(self, seconds: float = REMEMBERED_S) -> None:
        self._seconds = seconds
        self._notes: OrderedDict[int | str | None, tuple[Note, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, room: int | str, note: Note) -> None:
        """Add a note. The oldest is removed if the table is full."""
        # Not at the top: circular import.
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
