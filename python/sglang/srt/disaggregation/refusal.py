"""A request that one worker of a pair refuses before any handshake, and how the other one learns of it.

The router gives a request to both. Mostly both refuse it for the same reason. Where only one does (its limits are
smaller, or the request's rid is in use there), the other would wait for its peer until it times out.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.disaggregation.common.authentication import SignedRequests
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

logger = logging.getLogger(__name__)

__all__ = ["REFUSED_ROUTE", "RefusedReq", "RefusedRooms", "heard", "listen", "tell_prefill"]

# On a prefill's bootstrap server, which lives in the process of its tokenizer manager.
REFUSED_ROUTE = "/refused_room"
# Refusals that are remembered, for a request that comes after its refusal.
REMEMBERED = 4096

_listeners: list[Callable[[int, str], None]] = []


@dataclass
class RefusedReq:
    """From prefill's tokenizer manager to its scheduler: a room that decode has refused, or this prefill itself."""

    room: int
    reason: str
    by_decode: bool


class RefusedRooms(dict[int, str]):
    """Why a room was refused. The oldest is forgotten first."""

    def __setitem__(self, room: int, reason: str) -> None:
        super().__setitem__(room, reason)
        while len(self) > REMEMBERED:
            del self[next(iter(self))]


def listen(listener: Callable[[int, str], None]) -> None:
    """Have ``listener`` called with each room that decode refuses, on the bootstrap server's thread."""
    _listeners.append(listener)


def heard(room: int, reason: str) -> None:
    """Decode has refused ``room``."""
    for listener in _listeners:
        listener(room, reason)


def tell_prefill(host: str, port: int, room: int, reason: str) -> None:
    """Tell a prefill, without waiting for it, that decode has refused ``room``. One without the package has no ear."""
    if host == FAKE_BOOTSTRAP_HOST:
        return
    url = f"http://{host}:{port}{REFUSED_ROUTE}"

    def tell() -> None:
        try:
            SignedRequests().post(url, json={"room": room, "reason": reason}, timeout=5)
        except Exception as e:
            logger.warning("Could not tell prefill at %s:%s that room %s was refused: %s", host, port, room, e)

    threading.Thread(target=tell, daemon=True, name="tell-refusal").start()
