"""Decode's messages to a prefill rank, parsed once into typed values, for both transfer backends.

docs/protocol.md has the frames. Every message except a registration begins with its room and its
sender. The backend names decode ranks: by address over Mooncake, by agent over NIXL.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), for Mooncake #24257
(merged).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.disaggregation.decode_radix import hooks

# Last frame of decode's cancellation, and the reason with which prefill then fails the request.
CANCEL = b"cancel"
GIVEN_UP = "decode gave the request up"
# Last frame but one of decode's request for KV; the prompt's length follows.
PROMPT = b"prompt"
# Frames of the engine's request for KV, and of one with a prefix, whose frames follow the engine's.
ENGINE_FRAMES, PREFIX_FRAMES = 8, 10


@dataclass
class DeltaInfo:
    """What decode's request for KV says beyond the engine's TransferInfo; mixed into it.

    name, peer: the sender, in the engine's tables and for notices. decode_prefix_len: tokens that
    decode holds. dummy: whether this rank sends nothing; None without the flag. parts: see
    `MessagePart`, by tag. prompt: of decode, as far as reported. heard_until: see
    `CommonKVManager.heard_until`.
    """

    decode_prefix_len: int = 0
    dummy: bool | None = None
    parts: dict[bytes, Any] = field(default_factory=dict)
    prompt: bytes | None = None
    heard_until: float = math.inf
    name: str = ""
    peer: Hashable = None

    @property
    def names_prefix(self) -> bool:
        """Whether decode runs with the flag, so that this message names its prefix."""
        return self.dummy is not None

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> Any:
        """Wraps the engine's parser: reads the frames after its own. Raises ValueError."""
        prompt = None
        if len(msg) >= ENGINE_FRAMES + 4 and msg[-2] == PROMPT:
            msg, prompt = msg[:-2], msg[-1]
        msg, parts = split_parts(msg)
        info = super().from_zmq(msg)  # type: ignore[misc]
        info.prompt = prompt
        if len(msg) > ENGINE_FRAMES:
            if len(msg) != PREFIX_FRAMES:
                known = f"{PREFIX_FRAMES} frames, and parts that are known behind them"
                raise ValueError(
                    f"a message with a decode prefix has {known}; this one has {len(msg)} without "
                    "these"
                )
            if msg[9] not in (b"0", b"1"):
                raise ValueError(f"whether this rank is a dummy is not 0 or 1: {msg[9][:32]!r}")
            info.parts, info.dummy = parts, msg[9] == b"1"
            info.decode_prefix_len = wire_int(msg[8], "decode_prefix_len")
        return info


@dataclass(frozen=True)
class Unusable:
    """A request for KV that is invalid for ``reason``. peer: the sender, None if unreadable.

    names_prefix: whether it has frames that only a decode worker with a radix cache sends.
    """

    room: int
    peer: Hashable
    names_prefix: bool
    reason: str


@dataclass(frozen=True)
class Cancel:
    """A decode rank cancels a room, and keeps its pages until it gets an answer."""

    room: int
    peer: Hashable


OfRoom = DeltaInfo | Unusable | Cancel


def read_message(
    frames: list[bytes], peer: Callable[[list[bytes]], Hashable], info: Callable[[list[bytes]], Any]
) -> OfRoom | None:
    """Parse a message without its transport's own first frames; None for a registration of memory.

    peer, info: how the backend reads the sender, as notices name it, and its TransferInfo. Raises
    ValueError or IndexError if not even the room can be read.
    """
    if frames[0] == b"None":
        # It is the engine's.
        return None
    room = wire_int(frames[0], "room")
    if frames[4:] == [CANCEL]:
        return Cancel(room, peer(frames))
    sender = None
    try:
        sender = peer(frames)
        request = info(frames)
        request.name, request.peer = frames[3].decode("ascii"), sender
        return request
    except (ValueError, IndexError) as e:
        return Unusable(room, sender, len(frames) > ENGINE_FRAMES, str(e))


def room_header(room: int, host: str, port: int, name: str) -> list[bytes]:
    """The first frames of each message of decode about a request: the room and the sender."""
    return [b"%d" % room, host.encode("ascii"), b"%d" % port, name.encode("ascii")]


def split_parts(message: list[bytes]) -> tuple[list[bytes], dict[bytes, Any]]:
    """Split off the parts of extras, which are a message's last frames. Raises ValueError."""
    said = {}
    for part in reversed(hooks.PARTS):
        if len(message) >= PREFIX_FRAMES + part.size and message[-part.size] == part.tag:
            message, frames = message[: -part.size], message[-part.size :]
            said[part.tag] = part.read(frames[1:])
    return message, said


def wire_int(frame: bytes, name: str) -> int:
    """The decimal number in a frame. Raises ValueError naming the field if it is none."""
    try:
        return int(frame.decode("ascii"))
    except ValueError:
        raise ValueError(f"{name} is not a number: {frame[:32]!r}") from None


def asks_for_nothing(info: Any) -> bool:
    """Whether a TransferInfo is for a dummy rank; one backend has a method, the other a field."""
    return info.is_dummy() if callable(info.is_dummy) else info.is_dummy
