"""Messages over Mooncake's ZMQ sockets, parsed into typed values, and a socket that checks them.

docs/protocol.md has the frames; `common/wire.py` has those that both backends share.

Upstream: sgl-project/sglang#24257 (merged).
"""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable, Sequence, Set
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.wire import wire_int

logger = logging.getLogger(__name__)

# First frames of the engine's messages about its staging buffers, to prefill and to decode.
STAGING_TO_PREFILL, STAGING_TO_DECODE = (
    (b"WATERMARK", b"STAGING_RSP"),
    (b"CHUNK_READY", b"STAGING_REQ"),
)


@dataclasses.dataclass(frozen=True)
class Peer:
    """The address at which a decode rank with a radix cache gets notices."""

    endpoint: str
    port: int

    @classmethod
    def read(cls, frames: list[bytes]) -> Peer:
        """Parse two frames. Raises ValueError if they are no address."""
        return cls(frames[0].decode("ascii"), wire_int(frames[1], "port"))


def check_metadata(
    room: int, frames: list[bytes], item_lens: Sequence[int], buffers: Set[int | None]
) -> None:
    """Raise ValueError if the engine's message of metadata is invalid or is not for this request.

    item_lens: bytes of each part on this worker. buffers: of the request. A part may be shorter
    than here, if only one of both workers has a draft model.
    """
    if len(frames) != 6:
        raise ValueError(
            f"a message of metadata has 6 frames, this one of room {room} has {len(frames)}"
        )
    part, index = wire_int(frames[2], "part"), wire_int(frames[3], "metadata buffer")
    num_bytes = len(frames[5])
    if frames[4] != struct.pack(">I", num_bytes):
        raise ValueError(f"a part of {num_bytes} bytes says that it has another length")
    if not 0 <= part < len(item_lens):
        raise ValueError(f"it is part {part}, and this worker has parts 0 to {len(item_lens) - 1}")
    if index not in buffers:
        raise ValueError(f"it is for metadata buffer {index}, which this request does not have")
    if num_bytes > item_lens[part]:
        raise ValueError(f"it has {num_bytes} bytes for a part of at most {item_lens[part]} bytes")


@dataclasses.dataclass(frozen=True)
class End:
    """A prefill rank's notice that the transfer of a room is over.

    said: why it failed, or the answer to a part of the request. A failure without it comes from the
    engine, and the rank may still write.
    """

    succeeded: bool
    rank: int
    said: str | None

    @classmethod
    def read(cls, room: int, frames: list[bytes]) -> End:
        """Parse a message. Raises ValueError if it is invalid."""
        if len(frames) not in (3, 4):
            raise ValueError(
                "the end of a transfer has 3 or 4 frames, "
                f"this one of room {room} has {len(frames)}"
            )
        status, rank = wire_int(frames[1], "status"), wire_int(frames[2], "prefill rank")
        if status not in (KVPoll.Success, KVPoll.Failed):
            raise ValueError(f"room {room} cannot end with status {status}")
        said = frames[3].decode("ascii", "replace") if len(frames) == 4 else None
        return cls(status == KVPoll.Success, rank, said)


def end_frames(room: int, status: int, rank: int, said: str) -> list[bytes]:
    """The engine's message of an end and, as a fourth frame, what `End.said` gets."""
    return [*(b"%d" % n for n in (room, status, rank)), said.encode("ascii", "replace")]


class CheckedSocket:
    """The manager's socket for the engine's threads, which end at the first unreadable message.

    check: gets the frames; False if it has handled them, raises if they are unusable.
    """

    def __init__(self, socket: Any, check: Callable[[list[bytes]], bool]):
        self.socket = socket
        self.check = check

    def recv_multipart(self) -> list[bytes]:
        """The next message for the engine's thread."""
        while True:
            frames = self.socket.recv_multipart()
            try:
                if self.check(frames):
                    return frames
            except Exception as e:
                logger.error("Ignored a message: %s", e)
