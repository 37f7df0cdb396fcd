"""The transfer queue of a prefill worker over Mooncake, as its one thread sees it.

Upstream: none is known.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class WatchedQueue:
    """A transfer queue, and its executor, as their one worker sees them.

    It knows the room whose chunk the worker is busy with. Chunks of which something has to go through decode's staging
    buffer wait here until decode has granted it, while others pass. prepare: writes what can be written of a chunk by
    way of that buffer; True when nothing is left of it there, None when the chunk must not be sent at all. done: called
    with the room of a chunk that the worker has done with.
    """

    def __init__(
        self,
        queue,
        executor: concurrent.futures.Executor,
        prepare: Callable[[Any], bool | None],
        done: Callable[[int], None],
    ) -> None:
        self.queue = queue
        self.executor = executor
        self.prepare = prepare
        self.done = done
        self.chunk: Any = None
        self.writes: set[concurrent.futures.Future] = set()
        self.room: int | None = None
        self.lock = threading.Lock()
        self.afterwards: list[Callable[[], None]] = []
        # Chunks by room, in order, and since when each room waits; rooms of which something may have become ready.
        self.waiting: dict[int, deque] = {}
        self.since: dict[int, float] = {}
        self.news: deque[int] = deque()

    def get(self):
        """The next chunk. To ask for it means to be done with the last one."""
        self._rest()
        if self.chunk is not None:
            self.done(self.chunk.room)
            self.chunk = None
        while True:
            if not self.news:
                item = self.queue.get()
                if not isinstance(item, int):
                    self.since.setdefault(item.room, time.monotonic())
                    self.waiting.setdefault(item.room, deque()).append(item)
                self.news.append(item if isinstance(item, int) else item.room)
            chunk = self._first_ready(self.news[0])
            if chunk is not None:
                self._begin(chunk.room)
                self.chunk = chunk
                return chunk
            self.news.popleft()

    def _begin(self, room: int) -> None:
        with self.lock:
            self.room = room

    def _rest(self) -> None:
        # When one write of a chunk fails, the engine does not wait for those beside it.
        concurrent.futures.wait(self.writes)
        self.writes.clear()
        with self.lock:
            self.room = None
            afterwards, self.afterwards = self.afterwards, []
        for job in afterwards:
            job()

    def _first_ready(self, room: int):
        """The first chunk of ``room`` if nothing of it waits for staging memory; writes what has got some."""
        chunks = self.waiting.get(room, deque())
        self._begin(room)
        # Also of those behind the first: what decode has granted must not wait for anything.
        done = [self.prepare(chunk) for chunk in chunks]
        self._rest()
        while chunks and done[0] is not False:
            self.since[room] = time.monotonic()
            chunk = chunks.popleft()
            if not chunks:
                del self.waiting[room], self.since[room]
            if done.pop(0):
                return chunk
            self.done(room)
        return None

    def wake(self, room: int) -> None:
        """Have the worker look again at what waits of ``room``."""
        if room in self.waiting:
            self.queue.put(room)

    def submit(self, write: Callable, *args) -> concurrent.futures.Future:
        """Start one of the writes of a chunk."""
        future = self.executor.submit(write, *args)
        self.writes.add(future)
        return future

    def put(self, chunk) -> None:
        """Put a chunk back, as the engine does when staging memory is short."""
        self.chunk = None
        self.queue.put(chunk)

    def defer(self, room: int, job: Callable[[], None]) -> bool:
        """Have the worker run ``job`` when it is done with its chunk of ``room``; False if it is not busy with one."""
        with self.lock:
            if self.room != room:
                return False
            self.afterwards.append(job)
            return True


class WatchedQueues:
    """Those of all transfer threads of a worker. Each joins when its thread begins."""

    def __init__(self) -> None:
        self._all: list[WatchedQueue] = []

    def join(self, watched: WatchedQueue) -> None:
        """One more."""
        self._all.append(watched)

    def are_writing(self, room: int) -> bool:
        """Whether a worker is busy with a chunk of ``room``."""
        return any(watched.room == room for watched in self._all)

    def wake(self, room: int) -> None:
        """Have the workers look again at what waits of ``room``."""
        for watched in self._all:
            watched.wake(room)

    def waited_s(self, room: int) -> float:
        """Seconds for which something of ``room`` has waited for staging memory."""
        waits = [at for watched in self._all if (at := watched.since.get(room)) is not None]
        return time.monotonic() - min(waits) if waits else 0.0

    def when_quiet(self, room: int, job: Callable[[], None]) -> None:
        """Do ``job`` when no worker is busy with a chunk of ``room``: by the one that is, or here and now."""
        if not any(watched.defer(room, job) for watched in self._all):
            job()
