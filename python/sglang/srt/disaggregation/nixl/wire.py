"""Prefill's notifications over NIXL, parsed into typed values. docs/protocol.md has the texts.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); failures #36612
(merged).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.decode_radix import hooks


@dataclass(frozen=True)
class Chunk:
    """A chunk of the KV has been written; ``last`` if no other follows."""

    number: int
    last: bool


@dataclass(frozen=True)
class Metadata:
    """The metadata buffer has been written, or this agent has none to write."""


@dataclass(frozen=True)
class State:
    """The mamba state or SWA window of a hybrid model has been written."""


@dataclass(frozen=True)
class Answer:
    """This agent's answer to a part of decode's request, see `MessagePart`."""

    tag: bytes
    text: str


@dataclass(frozen=True)
class Failure:
    """The request has failed on prefill, and this agent writes no more for it."""

    reason: str


Notification = Chunk | Metadata | State | Answer | Failure


def room_of(text: str) -> tuple[int, str, list[str]]:
    """Split a notification into room, kind and rest. Raises ValueError if it is malformed."""
    room, kind, *rest = text.split("_", 2)
    return int(room), kind, rest


def read(kind: str, rest: list[str]) -> Notification:
    """Parse a notification. Raises ValueError or IndexError if it is malformed."""
    if kind == "kv":
        chunk, last, _ = (int(part) for part in rest[0].split("_"))
        if chunk < 0 or last not in (0, 1):
            raise ValueError("no such chunk")
        return Chunk(chunk, bool(last))
    if kind == "aux":
        return Metadata()
    if kind == "state":
        return State()
    if kind == "fail":
        return Failure(rest[0] if rest else "no reason")
    for part in hooks.parts():
        if part.answer is not None and kind == part.tag.decode():
            return Answer(part.tag, rest[0])
    raise ValueError(f"unknown kind {kind!r}")
