"""Decode's messages to a prefill rank, parsed once into typed values; the same over both transfer backends.

docs/protocol.md has the frames. Every message but a registration begins with its room and with who sends it. What a
decode rank is called is the backend's: where it listens, over Mooncake, or the name of its agent, over NIXL.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), for Mooncake #24257 (merged).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.decode_radix import hooks

Peer = TypeVar("Peer", bound=Hashable)

# Last frame of decode's message that it gave a request up, and the reason for which prefill then fails it.
CANCEL = b"cancel"
GIVEN_UP = "decode gave the request up"
# Last frame but one of decode's request for KV; behind it stands what decode says of its prompt: its length.
PROMPT = b"prompt"
# Frames of the engine's own request for KV, and with those of the prefix, which come behind them.
ENGINE_FRAMES, PREFIX_FRAMES = 8, 10


@dataclass(frozen=True)
class Registration:
    """A decode rank says where its memory is, in the engine's frames."""

    frames: list[bytes]


@dataclass(frozen=True)
class Request(Generic[Peer]):
    """A decode rank asks for the KV of a room.

    name: by which the engine's books know the rank. peer: by which it is told of the end. info: the backend's
    TransferInfo.
    """

    room: int
    name: str
    peer: Peer
    info: Any

    @property
    def is_dummy(self) -> bool:
        """Whether it asks this prefill rank for nothing."""
        return asks_for_nothing(self.info)


@dataclass(frozen=True)
class Unusable(Generic[Peer]):
    """A request for KV that cannot be right, for ``reason``. peer: who sent it, None where that cannot be read.

    names_prefix: whether it has frames that only a decode worker with a radix cache sends.
    """

    room: int
    peer: Peer | None
    names_prefix: bool
    reason: str


@dataclass(frozen=True)
class Cancel(Generic[Peer]):
    """A decode rank has given a room up, and keeps its pages until it is answered."""

    room: int
    peer: Peer


OfRoom = Request[Peer] | Unusable[Peer] | Cancel[Peer]


@dataclass(frozen=True)
class Reader(Generic[Peer]):
    """How a backend reads the frames of a message, without what its transport puts before them.

    peer: who sent it. name: by which the engine's books know him. info: the backend's TransferInfo. All of them raise
    ValueError or IndexError for what they cannot read.
    """

    peer: Callable[[list[bytes]], Peer]
    name: Callable[[Any], str]
    info: Callable[[list[bytes]], Any]

    def read(self, frames: list[bytes]) -> Registration | OfRoom[Peer]:
        """The message. Raises ValueError or IndexError for one of which not even the room is known."""
        if frames[0] == b"None":
            return Registration(frames)
        room = wire_int(frames[0], "room")
        if frames[4:] == [CANCEL]:
            return Cancel(room, self.peer(frames))
        try:
            frames, prompt = split_prompt(frames)
            info = self.info(frames)
            info.prompt = prompt
            return Request(room, self.name(info), self.peer(frames), info)
        except (ValueError, IndexError) as e:
            return Unusable(room, self._peer_or_none(frames), len(frames) > ENGINE_FRAMES, str(e))

    def _peer_or_none(self, frames: list[bytes]) -> Peer | None:
        try:
            return self.peer(frames)
        except (ValueError, IndexError):
            return None


def room_header(room: int, host: str, port: int, name: str) -> list[bytes]:
    """The frames with which each of decode's messages about a request begins: the room, and who it is."""
    return [b"%d" % room, host.encode("ascii"), b"%d" % port, name.encode("ascii")]


def delta_frames(
    header: list[bytes],
    kv_indices: npt.NDArray[np.int32],
    state_indices: list[int] | None,
    decode_prefix_len: int,
    body: Callable[[bool, bytes, bytes], list[bytes]],
) -> Callable[[bool], list[bytes]]:
    """The frames of a request for KV, for a dummy rank or not.

    kv_indices: pages to be written, int32. decode_prefix_len: tokens decode holds. body: what stands between header and
    prefix, of whether the rank is a dummy, the pages and the state's indices, both as int32 and both empty for a dummy.
    """
    pages = kv_indices.astype(np.int32).tobytes()
    states = b"" if state_indices is None else np.array(state_indices, dtype=np.int32).tobytes()

    def frames(is_dummy: bool) -> list[bytes]:
        own = body(True, b"", b"") if is_dummy else body(False, pages, states)
        return [*header, *own, b"%d" % decode_prefix_len, b"%d" % is_dummy]

    return frames


def check_prefix_frames(message: list[bytes]) -> None:
    """Check what a decode worker with a radix cache appends to the engine's eight frames. Raises ValueError."""
    if len(message) != PREFIX_FRAMES:
        known = f"{PREFIX_FRAMES} frames, and parts that are known behind them"
        raise ValueError(f"a message with a decode prefix has {known}; this one has {len(message)} without these")
    if message[9] not in (b"0", b"1"):
        raise ValueError(f"whether this rank is a dummy is not 0 or 1: {message[9][:32]!r}")


def split_prompt(message: list[bytes]) -> tuple[list[bytes], bytes | None]:
    """The message without what it says of decode's prompt, which are its last two frames, and that."""
    if len(message) < ENGINE_FRAMES + 4 or message[-2] != PROMPT:
        return message, None
    return message[:-2], message[-1]


def split_parts(message: list[bytes]) -> tuple[list[bytes], dict[bytes, Any]]:
    """The message without the parts of extras, which are its last frames, and what they say. Raises ValueError."""
    said = {}
    for part in reversed(hooks.parts()):
        if len(message) >= PREFIX_FRAMES + part.size and message[-part.size] == part.tag:
            message, frames = message[: -part.size], message[-part.size :]
            said[part.tag] = part.read(frames[1:])
    return message, said


def wire_int(frame: bytes, name: str) -> int:
    """The decimal number in a message frame. Raises ValueError naming the field when it is not one."""
    try:
        return int(frame.decode("ascii"))
    except ValueError:
        raise ValueError(f"{name} is not a number: {frame[:32]!r}") from None


def asks_for_nothing(info: Any) -> bool:
    """Whether a TransferInfo is one for a dummy rank; a method in one backend, a field in the other."""
    return info.is_dummy() if callable(info.is_dummy) else info.is_dummy
