"""The transfer queues of a prefill worker over Mooncake, and the chunks in them.

Upstream: sgl-project/sglang#35049 (merged), which waits for chunks that are outstanding.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class WatchedQueue:
    """A transfer queue and its executor, as their one worker thread uses them.

    room: being written. prepare: whether to send a chunk. done: called with each finished room.
    """

    def __init__(
        self,
        queue,
        executor: concurrent.futures.Executor,
        prepare: Callable[[Any], bool],
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


class QueuedChunks:
    """Number and sender of each room's queued chunks. Changed under the lock of `Rooms`.

    answers: to a part of decode's request, see `MessagePart`, by room. writers: transfer threads.
    """

    def __init__(self) -> None:
        self.answers: dict[int, str] = {}
        self.writers: set[int] = set()
        self._number: Counter[int] = Counter()
        self._senders: dict[int, Any] = {}

    def __contains__(self, room: object) -> bool:
        return room in self._number

    def __len__(self) -> int:
        """The number of rooms with queued chunks."""
        return len(self._number.keys() | self._senders.keys() | self.answers.keys())

    def add(self, room: int, sender: Any, answer: str | None) -> None:
        """Add a chunk of ``sender``'s request. answer: sent to decode when all is written."""
        self._number[room] += 1
        self._senders[room] = sender
        if answer is not None:
            self.answers[room] = answer

    def done(self, room: int) -> None:
        """A chunk has been written or discarded."""
        self._number[room] -= 1
        if self._number[room] <= 0:
            del self._number[room]
            self._senders.pop(room, None)
            self.answers.pop(room, None)

    def sender(self, room: int) -> Any:
        """The sender of the room's chunks; None if none is queued."""
        return self._senders.get(room)

    def is_late(self, room: int, live: Any) -> bool:
        """Whether this thread writes for an ended request. live: the room's sender now."""
        if threading.get_ident() not in self.writers:
            return False
        sender = self._senders.get(room)
        return sender is None or live is not sender
