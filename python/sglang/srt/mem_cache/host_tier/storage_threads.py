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
    from sglang.srt.mem_cache.host_tier.storage_pages import HostPages

__all__ = ["Counters", "StorageThreads"]

logger = logging.getLogger(__name__)

READERS = 4
# After an error, it is left alone so long; and what takes longer than this hangs.
PAUSE_S, HANGS_S = 5.0, 1.0


@dataclass
class Counters:
    """Tokens since the start.

    fetched: put into host memory. written; known: that it had already; dropped: not written since they had left host
    memory or it was left alone after an error; failed: an error came. What is tried again counts again. late: requests
    that waited no longer for it.
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


class StorageThreads:
    """Runs what is handed over: reads in some threads, in order of their coming, and writes in one."""

    def __init__(self, files: Any, pages: HostPages, name: str):
        """files: with the engine's interface of a storage. name: in messages."""
        self.files, self.pages, self.counters = files, pages, Counters()
        self.reading, self.writing = Trouble("Reading from", name), Trouble("Writing to", name)
        self._reads: queue.SimpleQueue[Callable[[torch.Tensor, Callable[[], None]], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[torch.Tensor], None] | None] = queue.SimpleQueue()
        # When each reader began with the call that it is in; 0 if it is in none.
        self._since = [0.0] * READERS
        for i in range(READERS):
            self._start(f"kv-storage-read-{i}", partial(self._read_on, i))
        self._start("kv-storage-write", self._write_on)

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def answers(self) -> bool:
        """Whether it is worth while to ask: it has not failed just now, and not every reader hangs."""
        return not self.reading.pausing and not self.hangs

    @property
    def hangs(self) -> bool:
        """Whether every reader hangs."""
        now = time.monotonic()
        return all(since and now - since > HANGS_S for since in self._since)

    def read(self, run: Callable[[torch.Tensor, Callable[[], None]], None]) -> None:
        """Run in a thread, with room for a page, and what is to be called before each call of the storage."""
        self._reads.put(run)

    def write(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run behind what was handed over before, with room for a page."""
        self._writes.put(run)

    def close(self) -> None:
        """Begin nothing more."""
        for _ in range(READERS):
            self._reads.put(None)
        self._writes.put(None)

    def _read_on(self, i: int) -> None:
        buffer, since = self.pages.buffer(), self._since

        def beat() -> None:
            since[i] = time.monotonic()

        while (run := self._reads.get()) is not None:
            beat()
            try:
                run(buffer, beat)
            except Exception as e:
                self.reading.came(e)
            since[i] = 0.0

    def _write_on(self) -> None:
        buffer = self.pages.buffer()
        while (run := self._writes.get()) is not None:
            try:
                run(buffer)
            except Exception as e:
                self.writing.came(e)
