"""A prefill rank's handling of decode's messages about a room, for both transfer backends.

A message may come before its room's request, during it, or long after its end.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); decode's cancellation
#27372 (merged).
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.rooms import OWN_ROOM
from sglang.srt.disaggregation.common.wire import (
    GIVEN_UP,
    Cancel,
    OfRoom,
    Unusable,
    asks_for_nothing,
)

logger = logging.getLogger(__name__)


class PrefillInbox:
    """Handles decode's messages, under the lock of the manager's `Rooms`.

    manager: has, of its backend, ``rank_word``: name of a decode rank in errors; ``can_tell``:
    whether to notify a rank of its unusable message, given whether it has a radix cache;
    ``dummies_answer``: whether a dummy rank answers a request for a failed room; ``in_the_way``:
    what of an earlier request blocks a room.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def take(self, message: OfRoom) -> None:
        """Handle one message of a decode rank about one room."""
        with self._manager.rooms.lock:
            if isinstance(message, Cancel):
                self._on_cancel(message)
            elif isinstance(message, Unusable):
                self._turn_down(message, message.reason)
            else:
                self._on_request(message)

    def _on_request(self, info: Any) -> None:
        """Handle a request for KV; its room may begin when all decode ranks have asked."""
        manager, rooms, room, name = self._manager, self._manager.rooms, info.room, info.name
        info.heard_until = manager.heard_until(info)
        asked = manager.transfer_infos.get(room, {})
        before, has_flag = asked.get(name), info.names_prefix
        if before is None and not asks_for_nothing(info):
            manager.end_notices.begin(room, info.peer, has_flag)
        if has_flag:
            manager.met_decode(info.endpoint, info.dst_port)
        counts = {i.required_dst_info_num for i in asked.values()}
        if before is None and has_flag and asked and len(asked) >= max(counts):
            # Their prefix decides what is sent, which may be in flight.
            self._too_late(info, f"another decode worker has asked for this room; {OWN_ROOM}")
        elif (unfit := self._unfit(info)) is not None:
            self._turn_down(info, unfit)
        elif has_flag and (ended := rooms.ended.get(room)) is not None:
            self._too_late(info, ended)
        elif has_flag and not asked and (why := manager.in_the_way(room)) is not None:
            self._turn_down(info, why)
        elif before is not None and (has_flag or before.names_prefix):
            word = manager.rank_word
            logger.error("Ignored a repeated request of decode %s %s for room %s", word, name, room)
        elif (n := info.required_dst_info_num) < 1 or counts - {n}:
            self._turn_down(info, f"it says that {sorted(counts | {n})} decode ranks will ask")
        else:
            # A room that succeeded may be used again, as in the engine.
            rooms.ended.pop(room, None)
            # Without the flag a repeated message replaces the last one, as in the engine.
            manager.transfer_infos.setdefault(room, {})[name] = info
            if before is None and len(manager.transfer_infos[room]) == n:
                manager.update_status(room, KVPoll.WaitingForInput)

    def _unfit(self, info: Any) -> str | None:
        """Why this rank cannot write to that decode rank's memory; another's room goes on."""
        manager = self._manager
        if info.name not in manager.decode_kv_args_table:
            return f"{manager.rank_word} {info.name!r} has not registered its memory"
        # A decode worker without the flag knows no refusal, and a dummy rank gets no messages.
        told = info.names_prefix and not asks_for_nothing(info)
        reason: str | None = manager.unfit(info.name) if told else None
        return reason

    def _too_late(self, info: Any, reason: str) -> None:
        """The request has failed here already, or other decode ranks have asked for the room."""
        manager = self._manager
        known = info.name in manager.decode_kv_args_table
        if known and (manager.dummies_answer or not asks_for_nothing(info)):
            manager.tell_failure(info.room, {info.peer}, reason)

    def _turn_down(self, msg: Any, reason: str) -> None:
        """Fail a room for an unusable message. The room's request may reach this worker later."""
        manager, room, peer = self._manager, msg.room, msg.peer
        reason = manager.rooms.refuse_request(room, reason)
        if peer is not None and manager.can_tell(peer, msg.names_prefix):
            manager.end_notices.begin(room, peer)
            manager.tell_failure(room, {peer}, reason)

    def _on_cancel(self, message: Cancel) -> None:
        """Handle a cancellation. Decode keeps the pages until this rank answers or has written all.

        A live request answers when its writes are done. A request that arrives later is refused.
        """
        manager, room, peer = self._manager, message.room, message.peer
        if room in manager.rooms.live:
            if manager.can_tell(peer, True):
                manager.cancels.setdefault(room, set()).add(peer)
            manager.rooms.give_up(room)
        elif room in manager.rooms.ended:
            # After a success decode has been told, or all is announced.
            failure = manager.rooms.ended[room]
            if failure is not None:
                manager.tell_failure(room, {peer}, failure)
        else:
            reason = manager.rooms.refuse_request(room, GIVEN_UP)
            manager.end_room(room, reason)
            # Left by decode's request, which came before this worker's own.
            manager.request_status.pop(room, None)
            if manager.can_tell(peer, True):
                manager.tell_failure(room, {peer}, reason)
