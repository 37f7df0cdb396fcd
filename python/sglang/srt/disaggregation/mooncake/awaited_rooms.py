"""Rooms that a decode rank over Mooncake waits for, and prefill ranks' messages about them.

Upstream: sgl-project/sglang#36612 (merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from sglang.srt.disaggregation.mooncake.wire import End


class AwaitedRooms:
    """Rooms for which prefill has been asked. Changed under the lock of `Rooms`."""

    def __init__(self) -> None:
        # By room, the buffers named to prefill: several while an earlier request has late writers.
        self.asked: dict[int, set[int | None]] = {}
        # By room: ranks that write no more; ranks that only failed; answers by prefill rank.
        self.quiet: dict[int, set[int]] = {}
        self.failed: dict[int, set[int]] = {}
        self.told: dict[int, dict[int, str]] = {}

    def __contains__(self, room: object) -> bool:
        return room in self.asked

    def __len__(self) -> int:
        """The number of rooms in all tables."""
        return len(self.asked.keys() | self.quiet.keys() | self.failed.keys() | self.told.keys())

    def add(self, room: int, metadata_buffer: int | None) -> None:
        """Prefill is asked to write the room's metadata to this buffer."""
        self.asked.setdefault(room, set()).add(metadata_buffer)

    def metadata_buffers(self, room: int) -> Set[int | None]:
        """The buffers to which the room's metadata may be written."""
        return self.asked.get(room, set())

    def add_end(self, room: int, end: End) -> None:
        """Record a prefill rank's notice."""
        quiet = end.succeeded or end.said is not None
        (self.quiet if quiet else self.failed).setdefault(room, set()).add(end.rank)
        if end.succeeded and end.said is not None:
            self.told.setdefault(room, {})[end.rank] = end.said

    def answers(self, room: int) -> Iterable[str]:
        """Prefill ranks' answers to a part of the request, see `MessagePart`."""
        return self.told.get(room, {}).values()

    def num_quiet(self, room: int, says_so: bool) -> int:
        """How many prefill ranks write no more; with ``says_so`` a mere failure is not enough."""
        quiet = self.quiet.get(room, set())
        return len(quiet if says_so else quiet | self.failed.get(room, set()))

    def forget(self, room: int) -> None:
        """Remove an ended request for which nobody writes."""
        self.asked.pop(room, None)
        for book in (self.quiet, self.failed, self.told):
            book.pop(room, None)
