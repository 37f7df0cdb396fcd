"""Rooms that a decode rank over Mooncake waits for, and what it does with prefill's messages.

Upstream: sgl-project/sglang#36612 (merged).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from typing import Any

from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake import wire

logger = logging.getLogger(__name__)


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

    def add_end(self, room: int, end: wire.End) -> None:
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


def take(manager: Any, frames: list[bytes]) -> bool:
    """Handle metadata or an end; returns whether the engine may handle the message too."""
    if frames[0] in wire.STAGING_TO_DECODE:
        return bool(manager.takes_engine_staging(frames))
    is_aux = frames[0] == manager.AUX_DATA_HEADER
    room = wire_int(frames[1] if is_aux else frames[0], "room")
    if room not in manager.awaited_rooms:
        logger.debug("Message for room %s, which nobody waits for", room)
        return False
    end = None if is_aux else wire.End.read(room, frames)
    if end is not None and manager.leaves_ends_to_the_engine:
        return end.said is None
    with manager.rooms.lock:
        # The scheduler may just have removed the room.
        if room in manager.awaited_rooms:
            _on_metadata(manager, room, frames) if end is None else manager.on_end(room, end)
    return False


def _on_metadata(manager: Any, room: int, frames: list[bytes]) -> None:
    """Have the engine write the metadata, which it does not check."""
    if manager.has_radix:
        try:
            part = wire.Metadata.read(room, frames)
            part.check(manager.kv_args.aux_item_lens, manager.awaited_rooms.metadata_buffers(room))
        except ValueError as e:
            logger.error("Room %s: its metadata cannot be used: %s", room, e)
            manager.fail_room(room, f"prefill's metadata cannot be used: {e}")
            return
    manager._handle_aux_data(frames)
