"""Whom of decode a prefill rank has told that it writes no more for a room.

Upstream: sgl-project/sglang#36612 (merged), by which both backends tell decode of a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

# Who a decode rank is: where it listens, over Mooncake, or the name of its agent, over NIXL.
Peer = TypeVar("Peer", bound=Hashable)

# Rooms of which it is known; a second word, if there is one, follows the first.
REMEMBERED = 4096


class LastWords(Generic[Peer]):
    """Each decode rank with the flag is told once for each time it asks: that all is written, or that no more will be.

    A second word would be taken for that of the next request of its room, whose pages are still being written to.
    """

    def __init__(self) -> None:
        # By room, whether each rank that has asked has been told; the oldest are forgotten.
        self._told: dict[int, dict[Peer, bool]] = {}
        self._lock = threading.Lock()

    def begin(self, room: int, peer: Peer, has_flag: bool = True) -> None:
        """``peer`` asks for ``room``, and waits for a word from here on. Without the flag it is left to the engine."""
        with self._lock:
            told = self._told.pop(room, {})
            # Another worker may have had that address.
            told.pop(peer, None)
            if has_flag:
                told[peer] = False
            if told:
                self._told[room] = told
            while len(self._told) > REMEMBERED:
                del self._told[next(iter(self._told))]

    def concerns(self, room: int, peer: Peer) -> bool:
        """Whether ``peer`` has asked for ``room``, as far as is known."""
        with self._lock:
            return peer in self._told.get(room, {})

    def take(self, room: int, peers: Iterable[Peer]) -> set[Peer]:
        """Those of ``peers`` that have not been told: whoever takes them is to tell them."""
        with self._lock:
            told = self._told.get(room, {})
            untold = {peer for peer in peers if not told.get(peer, False)}
            told.update((peer, True) for peer in untold if peer in told)
        return untold

    def unsaid(self, room: int, peer: Peer) -> None:
        """``peer`` was to be told and could not be."""
        with self._lock:
            if peer in self._told.get(room, {}):
                self._told[room][peer] = False
