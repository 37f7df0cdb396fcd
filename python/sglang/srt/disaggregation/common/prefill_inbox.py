"""What a prefill rank does with decode's messages about a room; the same over both transfer backends.

A message may come before its room's request, while that is here, or long after its end.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); decode's cancellation #27372 (merged).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.end_notices import EndNotices
from sglang.srt.disaggregation.common.rooms import Rooms, Verdict
from sglang.srt.disaggregation.common.wire import GIVEN_UP, Cancel, OfRoom, Queued, Request, Unusable

logger = logging.getLogger(__name__)

# By what the backend tells decode ranks apart.
Peer = TypeVar("Peer", bound=Hashable)


@dataclass(frozen=True)
class Books(Generic[Peer]):
    """Books of a prefill rank that its inbox reads and writes, under the lock of ``rooms``.

    asked: what decode ranks have asked for, by room and name, and registered: where their memory is, by name; both are
    the engine's. cancels: decode ranks that gave a live room up and have not been answered. end_notices: which of those
    that asked have been told of the end.
    """

    rooms: Rooms
    asked: dict[int, dict[str, Any]]
    registered: Mapping[str, Any]
    cancels: dict[int, set[Peer]]
    end_notices: EndNotices[Peer]


@dataclass(frozen=True)
class Backend(Generic[Peer]):
    """How backends differ in what they do with a message.

    rank_word: what a decode rank is called in errors. can_tell: whether one whose message cannot be used is to be told
    so and can be; its second argument says whether the message is one of a decode worker with a radix cache.
    dummies_answer: whether a dummy rank answers a request for a room that has failed. notes_silent_peers: whether it is
    noted when a decode worker without the flag asks, since any room may wait there unsaid. late_cancel: what to answer
    who gives up a room that has ended, by why it failed if it did; None for nothing. early_cancel: what to remember of
    a room that is given up before its request has come, and what to answer, by the refusal in full. in_the_way: what
    of an earlier request of a room keeps a new one from beginning, if anything.
    """

    rank_word: str
    can_tell: Callable[[Peer, bool], bool]
    dummies_answer: bool
    notes_silent_peers: bool
    late_cancel: Callable[[str | None], str | None]
    early_cancel: Callable[[str], tuple[str, str]]
    in_the_way: Callable[[int], str | None] = lambda room: None


class Worker(Protocol):
    """What a prefill's manager does for its inbox."""

    request_status: dict[int, KVPoll]

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Note how far a room is."""

    def end_room(self, room: int, reason: str | None = None) -> None:
        """Note that it has ended, and why if it failed."""

    def tell_failure(self, room: int, peers: Iterable, reason: str) -> None:
        """Tell decode ranks, each of them once, that a room has failed, when nothing is being written for it."""

    def unfit(self, name: str) -> str | None:
        """Why what the decode rank of this name asks for cannot be written to it; None if it can."""


class PrefillInbox(Generic[Peer]):
    """Takes decode's messages."""

    def __init__(self, books: Books[Peer], backend: Backend[Peer], worker: Worker) -> None:
        self._books, self._backend, self._worker = books, backend, worker

    def take(self, message: OfRoom[Peer]) -> None:
        """Take one message of a decode rank about one room."""
        with self._books.rooms.lock:
            if isinstance(message, Queued):
                self._books.rooms.note_waiting(message.room, message.host, message.port)
            elif isinstance(message, Cancel):
                self._on_cancel(message)
            elif isinstance(message, Unusable):
                self._turn_down(message.room, message.peer, message.names_prefix, message.reason)
            else:
                self._on_request(message)

    def _on_request(self, message: Request[Peer]) -> None:
        """Take a request for KV; its room may begin when all decode ranks have asked."""
        books, room, info, word = self._books, message.room, message.info, self._backend.rank_word
        info.heard_until = books.rooms.pulse.heard_until()
        if self._backend.notes_silent_peers and not info.names_prefix:
            books.rooms.silent_peer_at = time.monotonic()
        asked = books.asked.get(room, {})
        if message.name not in asked and not message.is_dummy:
            books.end_notices.begin(room, message.peer, info.names_prefix)
        known = message.name in books.registered
        unfit = None if known else f"{word} {message.name!r} has not registered its memory"
        # A decode worker without the flag understands no refusal, and a dummy rank is sent nothing.
        if known and info.names_prefix and not message.is_dummy:
            unfit = self._worker.unfit(message.name)
        verdict, reason = books.rooms.on_request(message, asked, unfit, self._backend.in_the_way(room))
        if verdict in (Verdict.TAKEN, Verdict.READY):
            books.asked.setdefault(room, {})[message.name] = info
            if verdict == Verdict.READY:
                self._worker.update_status(room, KVPoll.WaitingForInput)
        elif verdict == Verdict.REPEATED:
            logger.error("Ignored a repeated request of decode %s %s for room %s", word, message.name, room)
        elif verdict == Verdict.REFUSED:
            self._turn_down(room, message.peer, info.names_prefix, reason)
        elif known and (self._backend.dummies_answer or not message.is_dummy):
            self._worker.tell_failure(room, {message.peer}, reason)

    def _turn_down(self, room: int, peer: Peer | None, names_prefix: bool, reason: str) -> None:
        """Fail a room for a message that cannot be used. The room's request may come to this worker only later."""
        reason = self._books.rooms.refuse_request(room, reason)
        if peer is not None and self._backend.can_tell(peer, names_prefix):
            self._books.end_notices.begin(room, peer)
            self._worker.tell_failure(room, {peer}, reason)

    def _on_cancel(self, message: Cancel[Peer]) -> None:
        """Decode gave a room up and keeps its pages until this rank has answered, or said that all is written.

        A request that is here answers when its writes are done. One that has not come yet is refused when it comes.
        """
        books, room, peer = self._books, message.room, message.peer
        can_tell = self._backend.can_tell(peer, True)
        if room in books.rooms.live:
            if can_tell:
                books.cancels.setdefault(room, set()).add(peer)
            books.rooms.give_up(room)
        elif books.rooms.has_ended(room):
            answer = self._backend.late_cancel(books.rooms.failure(room))
            if answer is not None:
                self._worker.tell_failure(room, {peer}, answer)
        else:
            remembered, answer = self._backend.early_cancel(books.rooms.refuse_request(room, GIVEN_UP))
            self._worker.end_room(room, remembered)
            # Of decode's request for it, which came before its own.
            self._worker.request_status.pop(room, None)
            if can_tell:
                self._worker.tell_failure(room, {peer}, answer)
