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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_backends import PageStorage
    from sglang.srt.mem_cache.host_tier.storage_pages import HostPages

__all__ = ["Counters", "StorageThreads"]

logger = logging.getLogger(__name__)

# Look-ups have threads of their own: behind long reads they would take as long as these.
READERS, LOOKERS = 4, 2
# After an error, or an answer that came too late, it is left alone so long.
PAUSE_S = 5.0


@dataclass
class Counters:
    """Tokens since the start.

    fetched: put into host memory. written; known: that it had already; dropped: not written since they had left host
    memory, it was full, or it was left alone after an error; failed: an error came. What is tried again counts again.
    late: requests that waited no longer for it.
    """

    fetched: int = 0
    written: int = 0
    known: int = 0
    dropped: int = 0
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

    def came(self, error: object) -> None:
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

    def __init__(self, trouble: Trouble) -> None:
        self.queue: queue.Queue[Callable[..., None] | None] = queue.Queue()
        self._trouble, self._size = trouble, 0

    def hire(self, start: Callable[[str, Callable[[], None]], None], name: str, *needs: Any) -> None:
        """Have one thread more, which ``start`` starts; what it runs gets ``needs``."""
        self._size += 1
        start(f"kv-storage-{name}-{self._size}", lambda: self._work(*needs))

    def _work(self, *needs: Any) -> None:
        while (run := self.queue.get()) is not None:
            try:
                run(*needs)
            except Exception as e:
                self._trouble.came(e)
            self.queue.task_done()

    def close(self) -> None:
        """Begin nothing more."""
        for _ in range(self._size):
            self.queue.put(None)


class StorageThreads:
    """Runs what is handed over: look-ups in some threads, reads in others, and writes in one."""

    def __init__(self, files: PageStorage, pages: HostPages, name: str):
        """name: in messages."""
        self.files, self.pages, self.counters = files, pages, Counters()
        self.reading, self.writing = Trouble("Reading from", name), Trouble("Writing to", name)
        self._looks, self._reads, self._writes = Crew(self.reading), Crew(self.reading), Crew(self.writing)
        for _ in range(LOOKERS):
            self._looks.hire(self._start, "look")
        for _ in range(READERS):
            self._reads.hire(self._start, "read", pages.buffer())
        self._writes.hire(self._start, "write", pages.buffer())

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def look(self, run: Callable[[], None]) -> None:
        """Run in a thread for look-ups."""
        self._looks.queue.put(run)

    def read(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run in a thread for reads, with room for a page."""
        self._reads.queue.put(run)

    def write(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run behind what was handed over before, with room for a page."""
        self._writes.queue.put(run)

    def close(self) -> None:
        """Begin nothing more."""
        for crew in self._looks, self._reads, self._writes:
            crew.close()
