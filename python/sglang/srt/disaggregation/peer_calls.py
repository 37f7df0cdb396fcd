"""Calls to other workers, on threads: one that does not answer delays what is told to it, and to nobody else.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

__all__ = ["PeerCalls", "TooManyCalls", "in_background"]

# Calls to one peer that are made at once and that wait; threads for all peers, and calls to all that wait. Requests
# name peers, so that there may be any number of those that do not answer.
AT_ONCE, MOST_WAITING, MOST_THREADS, MOST_WAITING_IN_ALL = 4, 1024, 256, 65536
# A scheduler asks in each step, thousands of times a second: seconds between two lines that say why it cannot.
SAY_AGAIN_S = 10.0
_said_at = -math.inf


def in_background(work: Callable[[], None], name: str) -> str | None:
    """Start ``work`` in a thread of its own. Returns why that cannot be done, if so.

    Requests name peers, and one of many may have as many threads as the system lets it: a scheduler goes on.
    """
    try:
        threading.Thread(target=work, daemon=True, name=name).start()
    except RuntimeError as e:
        global _said_at
        if time.monotonic() - _said_at >= SAY_AGAIN_S:
            _said_at = time.monotonic()
            logger.error("Peers cannot be asked now: %s", e)
        return str(e)
    return None


class TooManyCalls(Exception):
    """A peer, or too many of them, do not answer, and calls that wait are many; or there is no thread to make them."""


class PeerCalls:
    """Makes calls in the order in which they come for each peer, on threads that end when nothing waits.

    Where there are no more threads, the next one that is free goes to the peer that has the fewest, in turn: one that
    answers waits for no more than one call to each of those that do not.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock, self._threads = name, threading.Lock(), 0
        # The peer whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, deque[tuple[Future, Callable[[], Any]]]] = OrderedDict()
        self._under_way: dict[Hashable, int] = {}

    def submit(self, peer: Hashable, call: Callable[[], Any]) -> Future:
        """Have ``call`` made. One that has not begun can be cancelled. Raises `TooManyCalls`."""
        future: Future = Future()
        with self._lock:
            if len(self._waiting.get(peer, ())) >= MOST_WAITING or self._all_waiting() >= MOST_WAITING_IN_ALL:
                raise TooManyCalls("too many calls wait for an answer")
            self._waiting.setdefault(peer, deque()).append((future, call))
            if self._under_way.get(peer, 0) < AT_ONCE and self._threads < MOST_THREADS:
                self._hire(peer)
            if not self._threads:
                # Nobody would make it. Nor does anything else wait.
                self._waiting.clear()
                raise TooManyCalls("no thread can be started")
        return future

    def _hire(self, peer: Hashable) -> None:
        """Start a thread with the first call that waits for ``peer``; that waits on where the system has none left."""
        first = self._take(peer)
        if in_background(lambda: self._work(peer, *first), self._name) is None:
            self._threads += 1
        else:
            self._let_go(peer)
            self._waiting.setdefault(peer, deque()).appendleft(first)

    def _all_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _take(self, peer: Hashable) -> tuple[Future, Callable[[], Any]]:
        """The first call that waits for ``peer``, now under way. Others have their turns before its next."""
        one = self._waiting[peer].popleft()
        self._under_way[peer] = self._under_way.get(peer, 0) + 1
        if self._waiting[peer]:
            self._waiting.move_to_end(peer)
        else:
            del self._waiting[peer]
        return one

    def _let_go(self, peer: Hashable) -> None:
        """One call to ``peer`` is not under way any more."""
        self._under_way[peer] -= 1
        if not self._under_way[peer]:
            del self._under_way[peer]

    def _work(self, peer: Hashable, future: Future, call: Callable[[], Any]) -> None:
        one: tuple[Hashable, Future, Callable[[], Any]] | None = peer, future, call
        while one is not None:
            peer, future, call = one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:
                    future.set_exception(e)
            one = self._next(peer)

    def _next(self, done: Hashable) -> tuple[Hashable, Future, Callable[[], Any]] | None:
        """What to do after a call to ``done``; None ends the thread that asks."""
        with self._lock:
            self._let_go(done)
            peer = min(self._waiting, key=lambda one: self._under_way.get(one, 0), default=None)
            if peer is None or self._under_way.get(peer, 0) >= AT_ONCE:
                self._threads -= 1
                return None
            return peer, *self._take(peer)
