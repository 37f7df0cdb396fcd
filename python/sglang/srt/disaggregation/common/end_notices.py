"""Which decode ranks a prefill rank has notified that it writes no more for a room.

Upstream: sgl-project/sglang#36612 (merged), by which both backends tell decode of a failure.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from sglang.srt.disaggregation.bounded import remember

# Identity of a decode rank: its address over Mooncake, the name of its agent over NIXL.
Peer = TypeVar("Peer", bound=Hashable)

# Number of rooms kept.
REMEMBERED = 4096


class EndNotices(Generic[Peer]):
    """Ensures that each decode rank with the flag gets one notice per request: it has ended.

    Decode would take a second one for that of the room's next request, which is still written.
    """

    def __init__(self) -> None:
        # By room, whether each rank that asked has been notified; the oldest rooms are removed.
        self._told: OrderedDict[int, dict[Peer, bool]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, room: int, peer: Peer, has_flag: bool = True) -> None:
        """``peer`` asks for ``room`` and waits for a notice, unless it runs without the flag."""
        with self._lock:
            sent = self._told.pop(room, {})
            # Another worker may have had that address.
            sent.pop(peer, None)
            if has_flag:
                sent[peer] = False
            if sent:
                remember(self._told, room, sent, REMEMBERED)

    def concerns(self, room: int, peer: Peer) -> bool:
        """Whether ``peer`` is known to have asked for ``room``."""
        with self._lock:
            return peer in self._told.get(room, {})

    def take(self, room: int, peers: Iterable[Peer]) -> set[Peer]:
        """Those of ``peers`` that have not been notified; the caller notifies them."""
        with self._lock:
            sent = self._told.get(room, {})
            due = {peer for peer in peers if not sent.get(peer, False)}
            sent.update((peer, True) for peer in due if peer in sent)
        return due

    def undelivered(self, room: int, peer: Peer) -> None:
        """The notice to ``peer`` could not be sent: it is due again."""
        with self._lock:
            if peer in self._told.get(room, {}):
                self._told[room][peer] = False
