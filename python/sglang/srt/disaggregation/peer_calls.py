"""Calls to other workers, on threads: one that does not answer delays what is told to it, and to nobody else.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

__all__ = ["PeerCalls", "TooManyCalls"]

# Calls to one peer that are made at once and that wait, and threads for all peers: requests name them, so that there
# may be any number of those that do not answer.
AT_ONCE, MOST_WAITING, MOST_THREADS = 4, 1024, 256


class TooManyCalls(Exception):
    """A peer, or too many of them, do not answer, and calls that wait are many."""


class PeerCalls:
    """Makes calls in the order in which they come for each peer, on threads that end when nothing waits for it."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._waiting: dict[Hashable, deque[tuple[Future, Callable[[], Any]]]] = {}
        self._threads: dict[Hashable, int] = {}

    def submit(self, peer: Hashable, call: Callable[[], Any]) -> Future:
        """Have ``call`` made. One that has not begun can be cancelled. Raises `TooManyCalls`."""
        future: Future = Future()
        with self._lock:
            threads, waiting = self._threads.get(peer, 0), self._waiting.get(peer, ())
            more = threads < AT_ONCE and sum(self._threads.values()) < MOST_THREADS
            if len(waiting) >= MOST_WAITING or not (threads or more):
                raise TooManyCalls("too many calls wait for an answer")
            self._waiting.setdefault(peer, deque()).append((future, call))
            if more:
                self._threads[peer] = threads + 1
                threading.Thread(target=self._work, args=(peer,), name=self._name, daemon=True).start()
        return future

    def _work(self, peer: Hashable) -> None:
        while (one := self._next(peer)) is not None:
            future, call = one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as e:
                future.set_exception(e)

    def _next(self, peer: Hashable) -> tuple[Future, Callable[[], Any]] | None:
        """What to do next for ``peer``; None ends the thread that asks."""
        with self._lock:
            waiting = self._waiting[peer]
            if waiting:
                return waiting.popleft()
            self._threads[peer] -= 1
            if not self._threads[peer]:
                del self._threads[peer], self._waiting[peer]
            return None
