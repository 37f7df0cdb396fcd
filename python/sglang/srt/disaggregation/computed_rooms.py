"""A room whose prompt decode computes itself: prefill need not, and answers its own client at once.

The gateway sends a request to both workers and waits for prefill's answer before it hands on decode's. So prefill's
front ends the request as soon as decode says so, with no tokens, and its scheduler drops it.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from sglang.srt.disaggregation.common.authentication import SignedRequests
from sglang.srt.disaggregation.peer_calls import AT_ONCE, PeerCalls, TooManyCalls
from sglang.srt.disaggregation.room_notes import COMPUTED, RoomNotes, is_room

logger = logging.getLogger(__name__)

__all__ = [
    "COMPUTED",
    "COMPUTED_ROUTE",
    "ComputedReq",
    "ComputedRooms",
    "listen",
    "receive",
    "tell_prefill",
]

# On a prefill's bootstrap server.
COMPUTED_ROUTE = "/computed_room"
# Rooms that are remembered for requests still to come, and seconds for which they are.
REMEMBERED, REMEMBERED_S = 65536, 60.0
# Seconds that a prefill has to answer; how often it is told again, and after how many seconds.
ANSWER_S, TRIES, AGAIN_S = 5.0, 4, 1.0
# To which connections are kept.
PEERS = 64

_tellers = PeerCalls("tell-computed")
# Keeps its connections: one for each room would take as long as all else.
_session = requests.Session()
_session.trust_env = False
_session.mount("http://", HTTPAdapter(PEERS, AT_ONCE))
# Requests name peers, and none has anything to be remembered for another.
_session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
_requests = SignedRequests(_session)
_listeners: list[Callable[[int], None]] = []


@dataclass
class ComputedReq:
    """To prefill's scheduler: decode computes the prompt of this room, which the front has sent with this rid."""

    room: int
    rid: str


class ComputedRooms:
    """Rooms that decode computes and whose requests have not come here yet."""

    def __init__(self) -> None:
        self._rooms: RoomNotes[bool] = RoomNotes(REMEMBERED, REMEMBERED_S)

    def __len__(self) -> int:
        return len(self._rooms)

    def note(self, room: int) -> None:
        """Remember it, for a while."""
        self._rooms.note(room, True)

    def take(self, room: int | None) -> bool:
        """Whether decode computes it. Asked once: who uses the room again means another request."""
        return self._rooms.take(room) is not None


def listen(listener: Callable[[int], None]) -> None:
    """Have ``listener`` called with each room that decode computes, on the bootstrap server's thread."""
    _listeners.append(listener)


def receive(told: Any) -> None:
    """Hand a message of decode to the listeners. Raises ValueError if it names no room."""
    room: Any = told.get("room") if isinstance(told, dict) else None
    if not is_room(room):
        raise ValueError("a room that decode computes has a number")
    for listener in _listeners:
        listener(room)


def tell_prefill(addr: str, room: int) -> None:
    """Tell the prefill at ``addr``, without waiting for it, that its prompt of ``room`` is computed here.

    If it does not hear, its own client waits until prefill gives up; so it is told more than once.
    """

    def tell() -> None:
        for left in reversed(range(TRIES)):
            if _has_taken(addr, room):
                return
            if left:
                time.sleep(AGAIN_S)

    try:
        _tellers.submit(addr, tell)
    except TooManyCalls:
        logger.warning("Too many words wait to be told: prefill %s will wait for room %s", addr, room)


def _has_taken(addr: str, room: int) -> bool:
    def post() -> requests.Response:
        return _requests.post(f"http://{addr}{COMPUTED_ROUTE}", json={"room": room}, timeout=ANSWER_S)

    try:
        try:
            reply = post()
        except requests.ConnectionError as e:
            if isinstance(e, requests.Timeout):
                raise
            # The other end may have been closing a connection that had not been used for long.
            reply = post()
        if reply.status_code == 200:
            return True
        raise ValueError(f"status {reply.status_code}: {reply.text[:200]}")
    except Exception as e:
        logger.warning("Could not tell prefill %s that room %s is computed on decode: %s", addr, room, e)
    return False
