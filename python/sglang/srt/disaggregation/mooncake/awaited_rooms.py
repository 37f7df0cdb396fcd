"""What a decode rank over Mooncake waits for, and what the ranks of prefill have said of it.

Upstream: sgl-project/sglang#36612 (merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from sglang.srt.disaggregation.mooncake.wire import End


class AwaitedRooms:
    """Rooms for which prefill has been asked, and may say something. To be changed under the lock of `Rooms`."""

    def __init__(self) -> None:
        # By room, the metadata buffers that have been named. Several, where another request of the room came before
        # nobody wrote for the first any more.
        self.asked: dict[int, set[int | None]] = {}
        # By room: prefill ranks that write no more, and those that said no more than that they failed; and what they
        # have answered to a part of the request, by prefill rank.
        self.quiet: dict[int, set[int]] = {}
        self.failed: dict[int, set[int]] = {}
        self.told: dict[int, dict[int, str]] = {}

    def __contains__(self, room: object) -> bool:
        return room in self.asked

    def __len__(self) -> int:
        """How many rooms are mentioned."""
        return len(self.asked.keys() | self.quiet.keys() | self.failed.keys() | self.told.keys())

    def add(self, room: int, metadata_buffer: int | None) -> None:
        """Prefill is asked for it, and its metadata for this buffer."""
        self.asked.setdefault(room, set()).add(metadata_buffer)

    def metadata_buffers(self, room: int) -> Set[int | None]:
        """Those into which its metadata may be written."""
        return self.asked.get(room, set())

    def add_end(self, room: int, end: End) -> None:
        """Note what a prefill rank has said."""
        quiet = end.succeeded or end.said is not None
        (self.quiet if quiet else self.failed).setdefault(room, set()).add(end.rank)
        if end.succeeded and end.said is not None:
            self.told.setdefault(room, {})[end.rank] = end.said

    def answers(self, room: int) -> Iterable[str]:
        """What prefill ranks have answered to a part of the request, see `MessagePart`."""
        return self.told.get(room, {}).values()

    def num_quiet(self, room: int, says_so: bool) -> int:
        """How many prefill ranks write no more. says_so: whether this prefill says of a failure that this is so."""
        quiet = self.quiet.get(room, set())
        return len(quiet if says_so else quiet | self.failed.get(room, set()))

    def forget(self, room: int) -> None:
        """Its request has ended, and nobody writes for it."""
        self.asked.pop(room, None)
        for book in (self.quiet, self.failed, self.told):
            book.pop(room, None)
