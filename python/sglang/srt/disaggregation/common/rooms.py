"""A prefill worker's rooms: live or ended and why, decode's messages about them, and the answers.

Decode's messages and the worker's own requests arrive in any order. Both transfer backends use
these tables, keyed by the engine's bootstrap_room.

Upstream: none is known for all of it; sgl-project/sglang#27372 and #36612 (merged) have parts.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.wire import GIVEN_UP

logger = logging.getLogger(__name__)

# Ended rooms kept, so that a late or repeated message is not taken for a new request.
REMEMBERED_ROOMS = 65536
# Rooms and ranks of `EndNotices`.
REMEMBERED = 16384

# Advice if two requests have the same room.
OWN_ROOM = "each request needs a room of its own"

# The engine manager's tables with an entry for each live room, or a set of rooms per peer.
ENGINE_BOOKS = (
    "request_status",
    "failure_records",
    "transfer_infos",
    "required_prefill_response_num_table",
    "prefill_response_tracker",
    "addr_to_rooms_tracker",
)


def remember(book: OrderedDict, key: Any, value: Any, most: int) -> None:
    """Add an entry as the newest of at most ``most``, removing the oldest."""
    book.pop(key, None)
    book[key] = value
    while len(book) > most:
        # `popitem` is O(1); finding a dict's first key walks over all deleted entries.
        book.popitem(last=False)


class Rooms:
    """The rooms of one prefill worker.

    lock: for changes of these tables together with the engine's, by the scheduler and by the thread
    that reads decode's messages.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Senders of live requests.
        self.live: dict[int, Any] = {}
        # Senders of ended rooms whose writes are all posted and not all done.
        self.writing: dict[int, Any] = {}
        # Why a room ended, None for success; the oldest are removed.
        self.ended: OrderedDict[int, str | None] = OrderedDict()
        # Why decode's request is unusable, until the sender reads it; the oldest are removed.
        self.refused: OrderedDict[int, str] = OrderedDict()
        # Senders that no queue polls, not yet answered: decode cancelled them, or is lost, or
        # a write was in flight when they failed on another rank.
        self.given_up: deque[Any] = deque()
        # Whether a decode worker with the flag has sent a message.
        self.has_met_flag = False

    def begin(self, room: int, sender: Any) -> bool:
        """Assign ``room`` to an arriving request; returns False if another request holds it."""
        with self.lock:
            if self.holder(room) is not None:
                return False
            self.live[room] = sender
            self.ended.pop(room, None)
        return True

    def holder(self, room: int) -> Any:
        """The sender that holds the room: live, or with writes in flight. None if there is none."""
        writing = self.writing.get(room)
        # Decode may have received all before that was seen here.
        return writing if writing is not None and writing.is_writing() else self.live.get(room)

    def written(self, room: int, sender: Any) -> None:
        """The writes of an ended request of ``room`` are done."""
        with self.lock:
            if self.writing.get(room) is sender:
                del self.writing[room]

    def end(self, room: int, reason: str | None = None, posted: bool = False) -> None:
        """Record that ``room`` has ended, and why it failed.

        posted: all writes are posted, and the request holds the room until they are `written`.
        """
        with self.lock:
            sender = self.live.pop(room, None)
            if posted and sender is not None:
                self.writing[room] = sender
            remember(self.ended, room, reason, REMEMBERED_ROOMS)

    def refuse(self, room: int, reason: str) -> None:
        """Record for the sender why decode's request is unusable; replaces only a cancellation."""
        with self.lock:
            first = self.refused.get(room, GIVEN_UP)
            kept = reason if first.endswith(GIVEN_UP) else first
            # If the room has failed already, nobody would read it.
            if self.ended.get(room) is None:
                remember(self.refused, room, kept, REMEMBERED_ROOMS)

    def refuse_request(self, room: int, reason: str) -> str:
        """`refuse` with the reason that clients of both workers see; returns it."""
        reason = f"refused decode's request for KV: {reason}"
        logger.error("Room %s: %s", room, reason)
        self.refuse(room, reason)
        return reason

    def give_up(self, room: int, reason: str = GIVEN_UP) -> None:
        """Record that decode cancelled a live ``room``; an unread reason stays."""
        with self.lock:
            self.refused.setdefault(room, reason)
            self.given_up.append(self.live[room])

    def settle(self) -> None:
        """Poll these senders, and remove those that have ended and so answered decode."""
        for _ in range(len(self.given_up)):
            sender = self.given_up.popleft()
            status = sender.poll()
            if status == KVPoll.Success:
                # Decode has been notified of the success.
                self.refused.pop(sender.bootstrap_room, None)
            elif status != KVPoll.Failed:
                # Writes are in flight.
                self.given_up.append(sender)


class EndNotices:
    """Ensures that each decode rank with the flag gets one notice per request: it has ended.

    Decode would take a second one for that of the room's next request, which is still written.
    """

    def __init__(self) -> None:
        # Whether a rank that asked for a room has been notified; the oldest are removed.
        self._told: OrderedDict[tuple[int, Hashable], bool] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, room: int, peer: Hashable, has_flag: bool = True) -> None:
        """``peer`` asks for ``room`` and waits for a notice, unless it runs without the flag."""
        with self._lock:
            # Another worker may have had that address.
            self._told.pop((room, peer), None)
            if has_flag:
                remember(self._told, (room, peer), False, REMEMBERED)

    def concerns(self, room: int, peer: Hashable) -> bool:
        """Whether ``peer`` is known to have asked for ``room``."""
        return (room, peer) in self._told

    def take(self, room: int, peers: Iterable[Hashable]) -> set:
        """Those of ``peers`` that have not been notified; the caller notifies them."""
        with self._lock:
            due = {peer for peer in peers if not self._told.get((room, peer))}
            self._told.update(((room, peer), True) for peer in due if (room, peer) in self._told)
        return due

    def undelivered(self, room: int, peer: Hashable) -> None:
        """The notice to ``peer`` could not be sent: it is due again."""
        with self._lock:
            if (room, peer) in self._told:
                self._told[room, peer] = False
