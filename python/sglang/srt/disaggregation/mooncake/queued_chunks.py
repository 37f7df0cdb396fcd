"""Chunks that a prefill rank over Mooncake has queued for its transfer threads.

Upstream: sgl-project/sglang#35049 (merged), which waits for chunks that are outstanding.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class QueuedChunks:
    """Number and sender of each room's queued chunks. Changed under the lock of `Rooms`.

    answers: to a part of decode's request, see `MessagePart`, by room. writers: transfer threads.
    """

    def __init__(self) -> None:
        self.answers: dict[int, str] = {}
        self.writers: set[int] = set()
        self._number: Counter[int] = Counter()
        self._senders: dict[int, Any] = {}

    def __contains__(self, room: object) -> bool:
        return room in self._number

    def __len__(self) -> int:
        """The number of rooms with queued chunks."""
        return len(self._number.keys() | self._senders.keys() | self.answers.keys())

    def add(self, room: int, sender: Any, answer: str | None) -> None:
        """Add a chunk of ``sender``'s request. answer: sent to decode when all is written."""
        self._number[room] += 1
        self._senders[room] = sender
        if answer is not None:
            self.answers[room] = answer

    def done(self, room: int) -> None:
        """A chunk has been written or discarded."""
        self._number[room] -= 1
        if self._number[room] <= 0:
            del self._number[room]
            self._senders.pop(room, None)
            self.answers.pop(room, None)

    def sender(self, room: int) -> Any:
        """The sender of the room's chunks; None if none is queued."""
        return self._senders.get(room)

    def is_late(self, room: int, live: Any) -> bool:
        """Whether this thread writes for an ended request. live: the room's sender now."""
        if threading.get_ident() not in self.writers:
            return False
        sender = self._senders.get(room)
        return sender is None or live is not sender
