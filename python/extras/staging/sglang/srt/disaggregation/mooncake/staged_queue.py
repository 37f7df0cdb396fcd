"""Transfer queue of a prefill worker over Mooncake, in which chunks may wait for decode's staging memory.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from sglang.srt.disaggregation.mooncake.watched_queue import WatchedQueue


class StagedQueue(WatchedQueue):
    """Holds chunks with staged pieces until decode has granted memory for them.

    Other chunks bypass them. prepare: writes granted pieces of a chunk; returns True when none is left, None if the
    chunk must not be sent at all.
    """

    def __init__(self, *args):
        super().__init__(*args)
        # Chunks by room, in order; time since which each room waits; rooms with changes.
        self.waiting: dict[int, deque] = {}
        self.since: dict[int, float] = {}
        self.news: deque[int] = deque()

    def get(self):
        """The next chunk. Also marks the previous one as done."""
        self._finish()
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

    def _first_ready(self, room: int):
        """The first chunk of ``room``, if no piece of it waits for staging memory; writes granted pieces."""
        chunks = self.waiting.get(room, deque())
        self._begin(room)
        # Of all chunks, not only the first: granted memory must be written at once.
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
        """Have the worker check the waiting chunks of ``room``."""
        if room in self.waiting:
            self.queue.put(room)


def _staged(queues: Iterable[WatchedQueue]) -> Iterable[StagedQueue]:
    return (watched for watched in queues if isinstance(watched, StagedQueue))


def wake(queues: Iterable[WatchedQueue], room: int) -> None:
    """Have the workers check the waiting chunks of ``room``."""
    for watched in _staged(queues):
        watched.wake(room)


def waited_s(queues: Iterable[WatchedQueue], room: int) -> float:
    """Seconds for which a chunk of ``room`` has waited for staging memory."""
    waits = [at for watched in _staged(queues) if (at := watched.since.get(room)) is not None]
    return time.monotonic() - min(waits) if waits else 0.0
