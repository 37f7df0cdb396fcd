"""Messages about pieces of a delta that go through decode's staging buffer. docs/protocol.md has the frames.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import dataclasses
import logging

from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake.wire import Peer

logger = logging.getLogger(__name__)

# The engine's messages about staging buffers, to prefill, and how many numbers follow; then comes decode's session.
ENGINE_STAGING = {b"WATERMARK": 2, b"STAGING_RSP": 5}
# Prefill's messages, and decode's answer.
STAGE, STAGED, GRANT = b"stage", b"staged", b"grant"


@dataclasses.dataclass(frozen=True)
class Grant:
    """Decode has memory for the piece of a room that begins at page ``start``: at ``offset`` in its staging buffer."""

    room: int
    session: str
    start: int
    offset: int

    @classmethod
    def read(cls, frames: list[bytes]) -> Grant | None:
        """From a message; None for another. Raises ValueError for what cannot be right."""
        if frames[4:5] != [GRANT]:
            return None
        room = wire_int(frames[0], "room")
        if len(frames) != 7:
            raise ValueError(f"a grant of staging memory has 7 frames, this one of room {room} has {len(frames)}")
        start, offset = wire_int(frames[5], "first page"), wire_int(frames[6], "offset")
        if start < 0 or offset < 0:
            raise ValueError(f"a grant of staging memory of room {room} begins below 0: page {start}, offset {offset}")
        return cls(room, frames[3].decode("ascii"), start, offset)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Prefill's ``rank`` wants staging memory for ``num_pages`` pages of a delta from ``start`` on; ``peer`` is it."""

    rank: int
    start: int
    num_pages: int
    peer: Peer


@dataclasses.dataclass(frozen=True)
class Written:
    """Prefill's ``rank`` has written its part of the piece that begins with page ``start``."""

    rank: int
    start: int


def is_piece(frames: list[bytes]) -> bool:
    """Whether a message to decode is about a piece of a delta."""
    return frames[1:2] in ([STAGE], [STAGED])


def read_piece(frames: list[bytes]) -> Wanted | Written:
    """From a message for which `is_piece` holds. Raises ValueError for what cannot be right."""
    if len(frames) != (7 if frames[1] == STAGE else 4):
        raise ValueError(f"a message about a piece of a delta has {len(frames)} frames")
    rank, start = wire_int(frames[2], "prefill rank"), wire_int(frames[3], "first page")
    if frames[1] == STAGED:
        return Written(rank, start)
    return Wanted(rank, start, wire_int(frames[4], "pages"), Peer.read(frames[5:7]))


class EngineStaging:
    """The engine's messages about staging buffers, as a worker takes them."""

    def __init__(self) -> None:
        # Whether it has been said that a prefill uses staging buffers and this worker does not.
        self._told = False

    def takes(self, frames: list[bytes], uses: bool) -> bool:
        """Whether the engine may take one. uses: whether it has staging buffers. Raises ValueError if not."""
        kind = frames[0]
        if kind == b"STAGING_REQ" and not uses:
            # One per chunk of every request; such a prefill then sends without.
            if not self._told:
                logger.warning(
                    "A prefill uses staging buffers (SGLANG_DISAGG_STAGING_BUFFER) and this worker does not, or not "
                    "with prefills without sglang-pd-radix: its KV comes without them."
                )
            self._told = True
            return False
        if not uses:
            raise ValueError(f"{kind!r} is of staging buffers, which this worker does not use")
        _check_engine_staging(frames)
        return True


def _check_engine_staging(frames: list[bytes]) -> None:
    """Raise ValueError for a message about staging buffers to prefill that would end the engine's thread."""
    kind, *rest = frames
    numbers = ENGINE_STAGING.get(kind)
    if numbers is None:
        # To decode.
        return
    if len(rest) < numbers + (kind == b"STAGING_RSP"):
        raise ValueError(f"{kind!r} has only {len(frames)} frames")
    for number in rest[:numbers]:
        # An offset may be negative: there is no memory.
        int(number.decode("ascii"))
    b"".join(rest[numbers:]).decode("ascii")
