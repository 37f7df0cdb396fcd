"""What a decode rank over Mooncake does with prefill's messages.

Upstream: sgl-project/sglang#36612 (merged).
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake import wire
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRooms

logger = logging.getLogger(__name__)

# First frames of the engine's messages about its own use of staging buffers.
ENGINE_STAGING = b"CHUNK_READY", b"STAGING_REQ"


class Worker(Protocol):
    """What decode's manager does for its inbox."""

    AUX_DATA_HEADER: bytes
    kv_args: Any
    has_radix: bool
    leaves_ends_to_the_engine: bool

    def takes_engine_staging(self, frames: list[bytes]) -> bool:
        """Whether the engine may take one of its own messages about staging buffers. Raises ValueError if not."""

    def on_end(self, room: int, end: wire.End) -> None:
        """A prefill rank writes no more for ``room``: it has written everything, or it has failed."""

    def fail_room(self, room: int, reason: str) -> None:
        """Fail one request."""

    def _handle_aux_data(self, frames: list[bytes]) -> None:
        """The engine's: write what has come into a metadata buffer."""


class DecodeInbox:
    """Takes metadata and the end of transfers, of rooms that prefill has been asked for."""

    def __init__(self, rooms: Rooms, awaited: AwaitedRooms, worker: Worker) -> None:
        self._rooms, self._awaited, self._worker = rooms, awaited, worker

    def check(self, frames: list[bytes]) -> bool:
        """Take a message; whether the engine may take it instead (staging)."""
        worker = self._worker
        if frames[0] in ENGINE_STAGING:
            return worker.takes_engine_staging(frames)
        is_aux = frames[0] == worker.AUX_DATA_HEADER
        room = wire_int(frames[1] if is_aux else frames[0], "room")
        if room not in self._awaited:
            logger.debug("Message for room %s, which nobody waits for", room)
            return False
        end = None if is_aux else wire.End.read(room, frames)
        if end is not None and worker.leaves_ends_to_the_engine:
            return end.said is None
        with self._rooms.lock:
            # The scheduler may just have closed its books.
            if room in self._awaited:
                self._on_metadata(room, frames) if end is None else worker.on_end(room, end)
        return False

    def _on_metadata(self, room: int, frames: list[bytes]) -> None:
        """Let the engine write it, which looks neither at where that is nor at its length.

        Without the flag as it has come.
        """
        worker = self._worker
        if worker.has_radix:
            try:
                metadata = wire.Metadata.read(room, frames)
                metadata.check(worker.kv_args.aux_item_lens, self._awaited.metadata_buffers(room))
            except ValueError as e:
                logger.error("Room %s: its metadata cannot be used: %s", room, e)
                worker.fail_room(room, f"prefill's metadata cannot be used: {e}")
                return
        worker._handle_aux_data(frames)
