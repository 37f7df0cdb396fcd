"""The transfer queues of a prefill worker over Mooncake, and the chunks in them.

Upstream: sgl-project/sglang#35049 (merged), which waits for chunks that are outstanding.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class WatchedQueue:
    """A transfer queue and its executor, as their one worker thread uses them.

    prepare: whether to send a chunk. done: called with each finished room. room: being written.
    """

    queue: Any
    executor: concurrent.futures.Executor
    prepare: Callable[[Any], bool | None]
    done: Callable[[int], None]
    chunk: Any = None
    writes: set[concurrent.futures.Future] = field(default_factory=set)
    room: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def get(self):
        """The next chunk. The call also finishes the last one."""
        while True:
            self._finish()
            self.chunk = self.queue.get()
            self._begin(self.chunk.room)
            if self.prepare(self.chunk):
                return self.chunk

    def _finish(self) -> None:
        self._rest()
        if self.chunk is not None:
            self.done(self.chunk.room)
            self.chunk = None

    def _begin(self, room: int) -> None:
        with self.lock:
            self.room = room

    def _rest(self) -> None:
        # If one write of a chunk fails, the engine does not wait for the others.
        concurrent.futures.wait(self.writes)
        self.writes.clear()
        with self.lock:
            self.room = None
            afterwards, self.afterwards = self.afterwards, []
        for job in afterwards:
            job()

    def submit(self, write: Callable, *args) -> concurrent.futures.Future:
        """Start one of a chunk's writes."""
        future = self.executor.submit(write, *args)
        self.writes.add(future)
        return future

    def put(self, chunk) -> None:
        """Put a chunk back, as the engine does when staging memory is short."""
        self.chunk = None
        self.queue.put(chunk)

    def defer(self, room: int, job: Callable[[], None]) -> bool:
        """Have the worker run ``job`` after its chunk of ``room``; False if it writes none."""
        with self.lock:
            if self.room != room:
                return False
            self.afterwards.append(job)
            return True


@dataclass(eq=False)
class RoomChunks:
    """Queued chunks of a room. answer: to a part of decode's request, see `MessagePart`."""

    sender: Any
    number: int = 0
    answer: str | None = None


class QueuedChunks(dict[int, RoomChunks]):
    """Queued chunks by room. Changed under the lock of `Rooms`. writers: transfer threads."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: set[int] = set()

    def add(self, room: int, sender: Any, answer: str | None) -> None:
        """Add a chunk of ``sender``'s request. answer: sent to decode when all is written."""
        chunks = self.setdefault(room, RoomChunks(sender))
        chunks.sender, chunks.number = sender, chunks.number + 1
        chunks.answer = answer or chunks.answer

    def done(self, room: int) -> None:
        """A chunk has been written or discarded."""
        chunks = self.get(room)
        if chunks is not None:
            chunks.number -= 1
            if chunks.number == 0:
                del self[room]

    def is_late(self, room: int, live: Any) -> bool:
        """Whether this thread writes for an ended request. live: the room's sender now."""
        if threading.get_ident() not in self.writers:
            return False
        chunks = self.get(room)
        return chunks is None or live is not chunks.sender
