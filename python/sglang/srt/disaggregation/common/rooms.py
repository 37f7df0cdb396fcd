"""What a prefill worker knows of rooms: which are live, which have ended and why, and what decode has said of them.

Decode's messages and the worker's own requests meet here in any order: a message may come before its request, or long
after its end. All of it is kept by the engine's bootstrap_room, and both transfer backends use the same books.

Upstream: none is known for all of it; sgl-project/sglang#27372 and #36612 (merged) have parts.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.bounded import remember
from sglang.srt.disaggregation.common.wire import GIVEN_UP, Request

logger = logging.getLogger(__name__)

# Rooms whose end is remembered, so that a message that comes too late or twice is not taken for a new request.
REMEMBERED_ROOMS = 65536

# What to do about two requests of one room.
OWN_ROOM = "each request needs a room of its own"

# Attributes of the engine's manager with an entry for each live room, or with a set of rooms for each peer.
ENGINE_BOOKS = (
    "request_status",
    "failure_records",
    "transfer_infos",
    "required_prefill_response_num_table",
    "prefill_response_tracker",
    "addr_to_rooms_tracker",
)


class Verdict(enum.Enum):
    """What becomes of decode's request for KV."""

    TAKEN = enum.auto()
    # It was the last that the room waited for: it may begin.
    READY = enum.auto()
    # It cannot be right, or not be met.
    REFUSED = enum.auto()
    # The request has failed here before decode asked for it, or is of other decode ranks, which have asked.
    TOO_LATE = enum.auto()
    REPEATED = enum.auto()


class Judged(NamedTuple):
    """A verdict, and why."""

    verdict: Verdict
    reason: str = ""


class Rooms:
    """The rooms of one prefill worker.

    lock: held by whoever changes these books and the engine's together; the scheduler and the thread that reads
    decode's messages both do.
    """

    def __init__(self, on_peer: Callable[[str, int], None] = lambda host, port: None) -> None:
        """on_peer: told of each decode rank with the flag, host and port, that sends a message here."""
        self._on_peer = on_peer
        self.lock = threading.RLock()
        # Senders of the requests that are here.
        self.live: dict[int, Any] = {}
        # Those of rooms that have ended, of which all has been posted and not all written.
        self.writing: dict[int, Any] = {}
        # Why a room ended, None if it ended well; the oldest are forgotten.
        self.ended: OrderedDict[int, str | None] = OrderedDict()
        # Why decode's request for a room cannot be used, until its sender reads it; the oldest are forgotten.
        self.refused: OrderedDict[int, str] = OrderedDict()
        # Live senders that decode has given up, or is gone from, and that have not answered it.
        self.given_up: deque[Any] = deque()
        # Whether a decode worker with the flag has sent a message.
        self.has_met_flag = False

    def begin(self, room: int, sender: Any) -> bool:
        """Whether a request that has come has its room, and what had ended of that is forgotten.

        Not if the room is that of one that has not ended, and stays so.
        """
        with self.lock:
            if self.holder(room) is not None:
                return False
            self.live[room] = sender
            self.reopen(room)
        return True

    def holder(self, room: int) -> Any:
        """The sender of the request that has this room: it is live, or being written. None if there is none."""
        writing = self.writing.get(room)
        # Decode may have had all of it before that was seen here.
        return writing if writing is not None and writing.is_writing() else self.live.get(room)

    def written(self, room: int, sender: Any) -> None:
        """Nothing is being written any more for a request of ``room``."""
        with self.lock:
            if self.writing.get(room) is sender:
                del self.writing[room]

    def reopen(self, room: int) -> None:
        """Forget that ``room`` has ended: what is asked for it now is of a new request."""
        with self.lock:
            self.ended.pop(room, None)

    def end(self, room: int, reason: str | None = None, posted: bool = False) -> None:
        """Remember that ``room`` has ended, and why if it failed.

        posted: all of it has been, and some may still have to be written. Its request has the room until `written`.
        """
        with self.lock:
            sender = self.live.pop(room, None)
            if posted and sender is not None:
                self.writing[room] = sender
            remember(self.ended, room, reason, REMEMBERED_ROOMS)

    def has_ended(self, room: int) -> bool:
        """Whether the last request of ``room`` has ended, as far back as is remembered."""
        return room in self.ended

    def failure(self, room: int) -> str | None:
        """Why ``room`` failed; None if it has not ended, or ended well."""
        return self.ended.get(room)

    def refuse(self, room: int, reason: str) -> None:
        """Note that decode's request for ``room`` cannot be used, for a sender that may come only later.

        The first reason stays, but for that decode has given it up, as it does when it has been told of another.
        """
        with self.lock:
            known = self.refused.get(room, GIVEN_UP)
            # Nobody would read it for a room that has failed already.
            if self.failure(room) is None:
                remember(self.refused, room, reason if known.endswith(GIVEN_UP) else known, REMEMBERED_ROOMS)

    def refuse_request(self, room: int, reason: str) -> str:
        """`refuse` it, in the words in which both workers' clients are told; returns them."""
        reason = f"refused decode's request for KV: {reason}"
        logger.error("Room %s: %s", room, reason)
        self.refuse(room, reason)
        return reason

    def take_refusal(self, room: int) -> str | None:
        """Why decode's request for ``room`` was refused, or that decode has given it up. It leaves the book."""
        with self.lock:
            return self.refused.pop(room, None)

    def give_up(self, room: int, reason: str = GIVEN_UP) -> None:
        """Note that decode has given up ``room``, which has a sender here. Its pages wait for an answer.

        A reason that the sender has not read stays.
        """
        with self.lock:
            self.refused.setdefault(room, reason)
            self.given_up.append(self.live[room])

    def on_request(
        self, message: Request, asked: Mapping[str, Any], unfit: str | None, in_the_way: str | None
    ) -> Judged:
        """What becomes of a decode rank's request for KV.

        asked: what decode ranks have asked for of this room, by name. unfit: why nothing can be written to this one's
        memory, if so; a room that is another worker's goes on. in_the_way: what of an earlier request of the room keeps
        a new one from beginning, if any.
        """
        room, info = message.room, message.info
        with self.lock:
            before = asked.get(message.name)
            if info.names_prefix:
                self.note_peer(info.endpoint, info.dst_port)
            if before is None and info.names_prefix and asked and len(asked) >= _awaited(asked):
                # What is sent begins where theirs does, and may be under way.
                return Judged(Verdict.TOO_LATE, f"another decode worker has asked for this room; {OWN_ROOM}")
            if unfit is not None:
                return Judged(Verdict.REFUSED, unfit)
            ended = self.failure(room)
            if ended is not None and info.names_prefix:
                return Judged(Verdict.TOO_LATE, ended)
            if in_the_way is not None and not asked and info.names_prefix:
                return Judged(Verdict.REFUSED, in_the_way)
            if before is not None and (info.names_prefix or before.names_prefix):
                return Judged(Verdict.REPEATED)
            counts = {other.required_dst_info_num for other in (*asked.values(), info)}
            if len(counts) > 1 or min(counts) < 1:
                return Judged(Verdict.REFUSED, f"it says that {sorted(counts)} decode ranks will ask")
            # A room that ended well may be used again, as in the engine.
            self.reopen(room)
        # Of a decode rank without the flag, the last message counts, as in the engine. The room is as ready as before.
        complete = before is None and len(asked) + 1 == info.required_dst_info_num
        return Judged(Verdict.READY if complete else Verdict.TAKEN)

    def note_peer(self, host: str, port: int) -> None:
        """Note that a decode rank with the flag sends messages here."""
        self.has_met_flag = True
        self._on_peer(host, port)

    def settle(self) -> None:
        """Poll what decode has given up, and forget what has ended by that: it has answered decode."""
        for _ in range(len(self.given_up)):
            sender = self.given_up.popleft()
            status = sender.poll()
            if status == KVPoll.Success:
                # Decode has been told of that.
                self.refused.pop(sender.bootstrap_room, None)
            elif status != KVPoll.Failed:
                # Some of it is being written.
                self.given_up.append(sender)


def _awaited(asked: Mapping[str, Any]) -> int:
    """How many decode ranks will ask, as those say that have."""
    return max(info.required_dst_info_num for info in asked.values())


def rooms_held(rooms: Rooms, books: Mapping[str, Any]) -> dict[str, int]:
    """How many rooms each book mentions. books: dicts and sets by room; of dicts of sets, each set is counted."""
    held = {"live": len(rooms.live), "writing": len(rooms.writing), "given_up": len(rooms.given_up)}
    for name, book in books.items():
        held[name] = sum(map(len, book.values())) if name == "addr_to_rooms_tracker" and book else len(book)
    return held
