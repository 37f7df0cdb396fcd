"""Threads that read from a storage and write to it, for one rank. Whatever it does, the scheduler waits for none.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_backend import PageStorage
    from sglang.srt.mem_cache.host_tier.storage_pages import HostPages

__all__ = ["Counters", "StorageThreads"]

logger = logging.getLogger(__name__)

# Look-ups have threads of their own: behind long reads they would take as long as these.
READERS, LOOKERS = 4, 2
# After an error, it is left alone so long; and what takes longer than this hangs.
PAUSE_S, HANGS_S = 5.0, 1.0


@dataclass
class Counters:
    """Tokens since the start.

    fetched: put into host memory. written; known: that it had already; dropped: not written since they had left host
    memory or it was left alone after an error; no_room: not written since it was full; failed: an error came. What is
    tried again counts again. late: requests that waited no longer for it.
    """

    fetched: int = 0
    written: int = 0
    known: int = 0
    dropped: int = 0
    no_room: int = 0
    failed: int = 0
    late: int = 0


class Trouble:
    """Errors of one kind of call: told once until one has worked again, and no call for a while after each."""

    def __init__(self, doing: str, name: str):
        self._doing, self._name = doing, name
        self._told, self._until = False, 0.0

    @property
    def pausing(self) -> bool:
        return time.monotonic() < self._until

    def came(self, error: BaseException) -> None:
        """A call has failed."""
        self._until = time.monotonic() + PAUSE_S
        if not self._told:
            self._told = True
            logger.warning(
                "%s the storage of KV (%s) fails: %s. Requests go on without it; it is tried again every %g s.",
                self._doing,
                self._name,
                error,
                PAUSE_S,
            )

    def ended(self) -> None:
        """A call has worked."""
        if self._told:
            self._told = False
            logger.info("%s the storage of KV (%s) works again.", self._doing, self._name)


class Crew:
    """Threads that do one kind of calls, in the order of their coming, each with what it needs for that."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[..., None] | None] = queue.SimpleQueue()
        # When each thread began with the call of the storage that it is in; 0 if it is in none.
        self.since: list[float] = []

    @property
    def hangs(self) -> bool:
        """Whether every thread hangs."""
        now = time.monotonic()
        return bool(self.since) and all(since and now - since > HANGS_S for since in self.since)

    def close(self) -> None:
        """Begin nothing more."""
        for _ in self.since:
            self.queue.put(None)

    def work(self, i: int, trouble: Trouble, *needs: Any) -> None:
        """What thread ``i`` does. What it runs gets ``needs``, and what it calls before each call of the storage."""
        since = self.since

        def beat() -> None:
            since[i] = time.monotonic()

        while (run := self.queue.get()) is not None:
            # What it does before the first call, as to hash a long prompt, is no hang of the storage.
            try:
                run(*needs, beat)
            except Exception as e:
                trouble.came(e)
            since[i] = 0.0


class StorageThreads:
    """Runs what is handed over: look-ups in some threads, reads in others, and writes in one."""

    def __init__(self, files: PageStorage, pages: HostPages, name: str):
        """name: in messages."""
        self.files, self.pages, self.counters = files, pages, Counters()
        self.reading, self.writing = Trouble("Reading from", name), Trouble("Writing to", name)
        self._looks, self._reads, self._writes = Crew(), Crew(), Crew()
        for _ in range(LOOKERS):
            self._hire(self._looks, "look", self.reading)
        for _ in range(READERS):
            self._hire(self._reads, "read", self.reading, pages.buffer())
        self._hire(self._writes, "write", self.writing, pages.buffer())

    def _hire(self, crew: Crew, name: str, trouble: Trouble, *needs: Any) -> None:
        i = len(crew.since)
        crew.since.append(0.0)
        self._start(f"kv-storage-{name}-{i}", partial(crew.work, i, trouble, *needs))

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether it is worth while to ask: it has not failed just now, and there is a thread for what comes of it."""
        return not self.reading.pausing and not self.hangs(reading=False)

    def hangs(self, reading: bool) -> bool:
        """Whether nothing comes of what is being read; of what is only asked for, a look-up may be what hangs, too."""
        return self._reads.hangs or (not reading and self._looks.hangs)

    def look(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Run in a thread for look-ups, with what is to be called before each call of the storage."""
        self._looks.queue.put(run)

    def read(self, run: Callable[[torch.Tensor, Callable[[], None]], None]) -> None:
        """Run in a thread for reads, with room for a page, and what is to be called as for `look`."""
        self._reads.queue.put(run)

    def write(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run behind what was handed over before, with room for a page."""
        self._writes.queue.put(lambda buffer, beat: run(buffer))

    def close(self) -> None:
        """Begin nothing more."""
        for crew in self._looks, self._reads, self._writes:
            crew.close()
