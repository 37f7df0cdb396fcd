"""Prefill's notifications over NIXL, parsed once into typed values, and decode's registration, with more behind the
engine's frames: the sizes of its states, which over Mooncake the engine tells. docs/protocol.md has the texts.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); failures #36612 (merged).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.decode_radix import hooks

# The engine's class comes behind.
Base: Any = object

# Frames of the engine's registration, without NIXL's guard before them.
REGISTRATION_FRAMES = 12


@dataclass(frozen=True)
class Chunk:
    """A chunk of the KV has been written; ``last`` if no other follows."""

    number: int
    last: bool


@dataclass(frozen=True)
class Metadata:
    """The metadata buffer has been written, as far as this agent has anything to write there."""


@dataclass(frozen=True)
class State:
    """The state, or the window, of a hybrid model has been written."""


@dataclass(frozen=True)
class Answer:
    """What this agent answers to a part of decode's request, see `MessagePart`."""

    tag: bytes
    text: str


@dataclass(frozen=True)
class Failure:
    """The request has failed on prefill, and this agent writes no more for it."""

    reason: str


Notification = Chunk | Metadata | State | Answer | Failure


def room_of(text: str) -> tuple[int, str, list[str]]:
    """The room of a notification, its kind and what follows. Raises ValueError for what is none."""
    room, kind, *rest = text.split("_", 2)
    return int(room), kind, rest


def read(kind: str, rest: list[str]) -> Notification:
    """What a notification says. Raises ValueError or IndexError for what it cannot say."""
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


def read_registration(parse: Callable[[list[bytes]], Any], frames: list[bytes]) -> Any:
    """What the engine's ``parse`` reads, and the bytes of a slot of each state, none where decode does not say.

    Raises ValueError for what cannot be read.
    """
    registered = parse(frames)
    sizes = np.frombuffer(b"".join(frames[REGISTRATION_FRAMES:]), dtype="<u4")
    registered.dst_state_item_lens = sizes.tolist()
    return registered


class SizedRegistration(Base):
    """A receiver that says how large its states are. `conn.py` puts it before the engine's."""

    def _register_kv_args(self) -> None:
        """Adds the sizes of its states, with a radix cache, where its model has any."""
        args = self.kv_mgr.kv_args
        if not (args.state_data_ptrs and self.kv_mgr.has_radix):
            super()._register_kv_args()
            return
        more = np.array(args.state_item_lens, dtype="<u4").tobytes()

        def connect(peer: dict) -> tuple[Any, Any]:
            socket, lock = self._connect_to_bootstrap_server(peer)
            return SimpleNamespace(send_multipart=lambda frames: socket.send_multipart([*frames, more])), lock

        sized = copy.copy(self)
        sized._connect_to_bootstrap_server = connect
        super(SizedRegistration, sized)._register_kv_args()
