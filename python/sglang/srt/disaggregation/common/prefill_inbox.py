"""A prefill rank's handling of decode's messages about a room, for both transfer backends.

A message may come before its room's request, during it, or long after its end.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); decode's cancellation
#27372 (merged).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.rooms import Verdict
from sglang.srt.disaggregation.common.wire import GIVEN_UP, Cancel, OfRoom, Request, Unusable

logger = logging.getLogger(__name__)

# The backend's identity of a decode rank.
Peer = TypeVar("Peer", bound=Hashable)


@dataclass(frozen=True)
class Backend(Generic[Peer]):
    """How a backend treats messages.

    rank_word: name of a decode rank in errors. can_tell: whether to notify a rank of its unusable
    message; second argument: whether decode has a radix cache. dummies_answer: whether a dummy rank
    answers a request for a failed room. late_cancel: the answer to a cancellation after the room's
    end, given the reason of a failure; None for none. early_cancel: given the refusal of a room
    cancelled before its request arrives, the reason to keep and the answer. in_the_way: what of an
    earlier request blocks the room; None if nothing.
    """

    rank_word: str
    can_tell: Callable[[Peer, bool], bool]
    dummies_answer: bool
    late_cancel: Callable[[str | None], str | None]
    early_cancel: Callable[[str], tuple[str, str]]
    in_the_way: Callable[[int], str | None] = lambda room: None


class PrefillInbox(Generic[Peer]):
    """Handles decode's messages, under the lock of the manager's `Rooms`."""

    def __init__(self, backend: Backend[Peer], manager: Any) -> None:
        self._backend, self._manager = backend, manager

    def take(self, message: OfRoom[Peer]) -> None:
        """Handle one message of a decode rank about one room."""
        with self._manager.rooms.lock:
            if isinstance(message, Cancel):
                self._on_cancel(message)
            elif isinstance(message, Unusable):
                self._turn_down(message.room, message.peer, message.names_prefix, message.reason)
            else:
                self._on_request(message)

    def _on_request(self, msg: Request[Peer]) -> None:
        """Handle a request for KV; its room may begin when all decode ranks have asked."""
        manager, room, info, word = self._manager, msg.room, msg.info, self._backend.rank_word
        info.heard_until = manager.heard_until(info)
        asked = manager.transfer_infos.get(room, {})
        if msg.name not in asked and not msg.is_dummy:
            manager.end_notices.begin(room, msg.peer, info.names_prefix)
        known = msg.name in manager.decode_kv_args_table
        unfit = None if known else f"{word} {msg.name!r} has not registered its memory"
        # A decode worker without the flag knows no refusal, and a dummy rank gets no messages.
        if known and info.names_prefix and not msg.is_dummy:
            unfit = manager.unfit(msg.name)
        in_the_way = self._backend.in_the_way(room)
        verdict, reason = manager.rooms.on_request(msg, asked, unfit, in_the_way)
        if verdict in (Verdict.TAKEN, Verdict.READY):
            manager.transfer_infos.setdefault(room, {})[msg.name] = info
            if verdict == Verdict.READY:
                manager.update_status(room, KVPoll.WaitingForInput)
        elif verdict == Verdict.REPEATED:
            logger.error(
                "Ignored a repeated request of decode %s %s for room %s", word, msg.name, room
            )
        elif verdict == Verdict.REFUSED:
            self._turn_down(room, msg.peer, info.names_prefix, reason)
        elif known and (self._backend.dummies_answer or not msg.is_dummy):
            manager.tell_failure(room, {msg.peer}, reason)

    def _turn_down(self, room: int, peer: Peer | None, names_prefix: bool, reason: str) -> None:
        """Fail a room for an unusable message. The room's request may reach this worker later."""
        reason = self._manager.rooms.refuse_request(room, reason)
        if peer is not None and self._backend.can_tell(peer, names_prefix):
            self._manager.end_notices.begin(room, peer)
            self._manager.tell_failure(room, {peer}, reason)

    def _on_cancel(self, message: Cancel[Peer]) -> None:
        """Handle a cancellation. Decode keeps the pages until this rank answers or has written all.

        A live request answers when its writes are done. A request that arrives later is refused.
        """
        manager, room, peer = self._manager, message.room, message.peer
        can_tell = self._backend.can_tell(peer, True)
        if room in manager.rooms.live:
            if can_tell:
                manager.cancels.setdefault(room, set()).add(peer)
            manager.rooms.give_up(room)
        elif manager.rooms.has_ended(room):
            answer = self._backend.late_cancel(manager.rooms.failure(room))
            if answer is not None:
                manager.tell_failure(room, {peer}, answer)
        else:
            reason, answer = self._backend.early_cancel(
                manager.rooms.refuse_request(room, GIVEN_UP)
            )
            manager.end_room(room, reason)
            # Left by decode's request, which came before this worker's own.
            manager.request_status.pop(room, None)
            if can_tell:
                manager.tell_failure(room, {peer}, answer)
