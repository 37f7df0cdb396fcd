"""Messages about pieces of a delta in decode's staging buffer. docs/protocol.md has the frames.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import dataclasses
import logging

from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake.wire import Peer

logger = logging.getLogger(__name__)

# The engine's staging messages to prefill, and their count of numbers; decode's session follows these.
ENGINE_STAGING = {b"WATERMARK": 2, b"STAGING_RSP": 5}
# Prefill's messages, and decode's answer.
STAGE, STAGED, GRANT = b"stage", b"staged", b"grant"


@dataclasses.dataclass(frozen=True)
class Grant:
    """Decode grants memory at ``offset`` in its staging buffer for a room's piece that begins at page ``start``."""

    room: int
    session: str
    start: int
    offset: int

    @classmethod
    def read(cls, frames: list[bytes]) -> Grant | None:
        """Parse a message; None if it is another one. Raises ValueError for invalid values."""
        if frames[4:5] != [GRANT]:
            return None
        room = wire_int(frames[0], "room")
        if len(frames) != 7:
            raise ValueError(f"a grant of staging memory has 7 frames, this one of room {room} has {len(frames)}")
        start, offset = wire_int(frames[5], "first page"), wire_int(frames[6], "offset")
        if start < 0 or offset < 0:
            raise ValueError(f"a grant of staging memory of room {room} is negative: page {start}, offset {offset}")
        return cls(room, frames[3].decode("ascii"), start, offset)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Prefill rank ``rank`` at ``peer`` requests memory for ``num_pages`` pages of a delta from ``start`` on."""

    rank: int
    start: int
    num_pages: int
    peer: Peer


@dataclasses.dataclass(frozen=True)
class Written:
    """Prefill rank ``rank`` has written its part of the piece that begins at page ``start``."""

    rank: int
    start: int


def is_piece(frames: list[bytes]) -> bool:
    """Whether a message to decode is about a piece of a delta."""
    return frames[1:2] in ([STAGE], [STAGED])


def read_piece(frames: list[bytes]) -> Wanted | Written:
    """Parse a message for which `is_piece` holds. Raises ValueError for invalid values."""
    if len(frames) != (7 if frames[1] == STAGE else 4):
        raise ValueError(f"a message about a piece of a delta has {len(frames)} frames")
    rank, start = wire_int(frames[2], "prefill rank"), wire_int(frames[3], "first page")
    if frames[1] == STAGED:
        return Written(rank, start)
    return Wanted(rank, start, wire_int(frames[4], "pages"), Peer.read(frames[5:7]))


class EngineStaging:
    """Filters the engine's messages about staging buffers."""

    def __init__(self) -> None:
        # Whether a mismatch with a prefill was logged.
        self._told = False

    def takes(self, frames: list[bytes], uses: bool) -> bool:
        """Whether to pass a message to the engine. uses: whether this worker stages. Raises ValueError if invalid."""
        kind = frames[0]
        if kind == b"STAGING_REQ" and not uses:
            # Sent once per chunk; without an answer such a prefill sends directly.
            if not self._told:
                logger.warning(
                    "A prefill uses staging buffers (SGLANG_DISAGG_STAGING_BUFFER) and this worker does not, or not "
                    "with prefills without sglang-pd-radix: its KV is sent without them."
                )
            self._told = True
            return False
        if not uses:
            raise ValueError(f"{kind!r} is about staging buffers, which this worker does not use")
        _check_engine_staging(frames)
        return True


def _check_engine_staging(frames: list[bytes]) -> None:
    """Raise ValueError for a staging message to prefill that would end the engine's thread."""
    kind, *rest = frames
    numbers = ENGINE_STAGING.get(kind)
    if numbers is None:
        # A message to decode.
        return
    if len(rest) < numbers + (kind == b"STAGING_RSP"):
        raise ValueError(f"{kind!r} has only {len(frames)} frames")
    for number in rest[:numbers]:
        # An offset is negative if there is no memory.
        int(number.decode("ascii"))
    b"".join(rest[numbers:]).decode("ascii")
