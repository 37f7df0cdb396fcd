"""A request that one worker of a pair refuses before any handshake, and how the other one learns of it.

The router gives a request to both. Mostly both refuse it for the same reason. Where only one does (its limits are
smaller, or the request's rid is in use there), the other would wait for its peer until it times out.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.common.authentication import SignedRequests
from sglang.srt.disaggregation.peer_calls import PeerCalls, TooManyCalls
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

__all__ = ["REFUSED_ROUTE", "RefusedReq", "RefusedRooms", "heard", "listen", "tell_prefill"]

# On a prefill's bootstrap server.
REFUSED_ROUTE = "/refused_room"
# Refusals that are remembered, for a request that comes after its refusal, and seconds for which they are. The router
# sends to both workers at once; who uses a room anew later means another request.
REMEMBERED, REMEMBERED_S = 4096, 10.0
# Of a reason; it comes from another worker.
MOST_CHARACTERS = 1000
# Seconds that a prefill has to answer.
ANSWER_S = 5.0

_tellers = PeerCalls("tell-refusal")
_listeners: list[Callable[[int, str], None]] = []


@dataclass
class RefusedReq:
    """To prefill's scheduler: a room that decode has refused, or this prefill itself."""

    room: int
    reason: str
    by_decode: bool


class RefusedRooms:
    """Why rooms were refused of late."""

    def __init__(self) -> None:
        self._reasons: dict[int, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, room: int, reason: str) -> None:
        """Remember it. The oldest is forgotten first."""
        self._reasons.pop(room, None)
        self._reasons[room] = reason, time.monotonic() + REMEMBERED_S
        while len(self._reasons) > REMEMBERED:
            del self._reasons[next(iter(self._reasons))]

    def reason(self, room: int | None) -> str | None:
        """Why, or None if it was not refused of late."""
        reason, until = self._reasons.get(room, ("", 0.0))  # type: ignore[arg-type]
        return reason if time.monotonic() < until else None


def listen(listener: Callable[[int, str], None]) -> None:
    """Have ``listener`` called with each room that decode refuses, on the bootstrap server's thread."""
    _listeners.append(listener)


def heard(told: Any) -> None:
    """Take what decode has told of a room that it has refused. Raises ValueError for what cannot be meant.

    Room 0 is nobody's: it is that of health checks.
    """
    room, reason = (told.get("room"), told.get("reason")) if isinstance(told, dict) else (None, None)
    if not isinstance(room, int) or isinstance(room, bool) or not 0 < room < 2**63 or not isinstance(reason, str):
        raise ValueError("a refusal has a room and a reason")
    for listener in _listeners:
        listener(room, reason[:MOST_CHARACTERS])


def tell_prefill(host: str, port: int, room: int, reason: str) -> None:
    """Tell a prefill, without waiting for it, that decode has refused ``room``. One without the package has no ear."""
    if host == FAKE_BOOTSTRAP_HOST:
        return
    url = NetworkAddress(host, port).to_url() + REFUSED_ROUTE

    def tell() -> None:
        try:
            SignedRequests().post(url, json={"room": room, "reason": reason[:MOST_CHARACTERS]}, timeout=ANSWER_S)
        except Exception as e:
            logger.warning("Could not tell prefill at %s:%s that room %s was refused: %s", host, port, room, e)

    try:
        _tellers.submit((host, port), tell)
    except TooManyCalls:
        logger.warning("Too many refusals wait to be told: prefill at %s:%s will wait for room %s", host, port, room)
