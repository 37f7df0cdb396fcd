"""Threads of one rank that read from a storage and write to it. The scheduler never waits for them.

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

# Look-ups have their own threads: behind long reads they would take as long as those.
READERS, LOOKERS = 4, 2
# After an error or a late answer the storage is not called for so many seconds.
PAUSE_S = 5.0


@dataclass
class Counters:
    """Tokens since the start.

    fetched: put into host memory. written. known: already stored. dropped: not written, because they had left host
    memory, the storage was full or it paused after an error. failed: an error occurred. A retry counts again.
    late: requests that stopped waiting.
    """

    fetched: int = 0
    written: int = 0
    known: int = 0
    dropped: int = 0
    failed: int = 0
    late: int = 0


class Trouble:
    """Errors of one kind of call: logged once until a call works again; each pauses these calls for ``PAUSE_S``."""

    def __init__(self, doing: str, name: str):
        self._doing, self._name = doing, name
        self._told, self._until = False, 0.0

    @property
    def pausing(self) -> bool:
        return time.monotonic() < self._until

    def came(self, error: object) -> None:
        self._until = time.monotonic() + PAUSE_S
        if not self._told:
            self._told = True
            logger.warning(
                "%s the KV storage (%s) fails: %s. Requests continue without it; retried every %g s.",
                self._doing,
                self._name,
                error,
                PAUSE_S,
            )

    def ended(self) -> None:
        if self._told:
            self._told = False
            logger.info("%s the KV storage (%s) works again.", self._doing, self._name)


class Crew:
    """Threads for one kind of call, run in order of arrival; each thread passes its own arguments."""

    def __init__(self, trouble: Trouble) -> None:
        self.queue: queue.Queue[Callable[..., None] | None] = queue.Queue()
        self._trouble, self._size = trouble, 0

    def hire(self, start: Callable[[str, Callable[[], None]], None], name: str, *needs: Any) -> None:
        """Add a thread, which ``start`` starts; calls get ``needs`` as arguments."""
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
        """End the threads after the calls in the queue."""
        for _ in range(self._size):
            self.queue.put(None)


class StorageThreads:
    """Runs look-ups, reads and writes in separate threads; writes in one."""

    def __init__(self, files: PageStorage, pages: HostPages, name: str):
        """name: the storage's, for messages."""
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
        self._looks.queue.put(run)

    def read(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run in a read thread, with its page buffer."""
        self._reads.queue.put(run)

    def write(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run after all earlier writes, with a page buffer."""
        self._writes.queue.put(run)

    def close(self) -> None:
        for crew in self._looks, self._reads, self._writes:
            crew.close()
