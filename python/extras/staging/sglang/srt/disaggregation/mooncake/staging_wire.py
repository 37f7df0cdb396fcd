"""Messages about pieces of a delta that go through decode's staging buffer. docs/protocol.md has the frames.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import dataclasses

from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.mooncake.wire import Peer

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
