"""Rooms that a decode rank over Mooncake waits for, and what it does with prefill's messages.

Upstream: sgl-project/sglang#36612 (merged).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake import wire

logger = logging.getLogger(__name__)


@dataclass
class AwaitedRoom:
    """A room for which prefill has been asked. Changed under the lock of `Rooms`.

    buffers: metadata buffers named to prefill: several while an earlier request has late writers.
    quiet: prefill ranks that write no more. failed: ranks that only failed. answers: to a part of
    the request, see `MessagePart`, by prefill rank.
    """

    buffers: set[int | None] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    answers: dict[int, str] = field(default_factory=dict)

    def add_end(self, end: wire.End) -> None:
        """Record a prefill rank's notice."""
        quiet = end.succeeded or end.said is not None
        (self.quiet if quiet else self.failed).add(end.rank)
        if end.succeeded and end.said is not None:
            self.answers[end.rank] = end.said

    def num_quiet(self, says_so: bool) -> int:
        """How many prefill ranks write no more; with ``says_so`` a mere failure is not enough."""
        return len(self.quiet if says_so else self.quiet | self.failed)


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
            buffers = manager.awaited_rooms[room].buffers
            wire.check_metadata(room, frames, manager.kv_args.aux_item_lens, buffers)
        except ValueError as e:
            logger.error("Room %s: its metadata cannot be used: %s", room, e)
            manager.fail_room(room, f"prefill's metadata cannot be used: {e}")
            return
    manager._handle_aux_data(frames)
