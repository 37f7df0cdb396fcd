"""What has come into host memory is written to a storage, once: in a thread, which holds nothing of host memory.

It reads a page, and then looks whether the page has been given away meanwhile. So an eviction waits for no storage,
and TP ranks, whose storages are not equally fast, hold the same.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads

__all__ = ["Write", "Writes"]


@dataclass(eq=False)
class Write:
    """Pages that are written, or are there already; and whether one of them is not there all the same."""

    lost: bool = False


class Writes:
    """The writes of one rank. Tokens that wait are bounded; what comes beyond that is dropped."""

    def __init__(self, threads: StorageThreads, most_tokens: int, enabled: bool):
        """enabled: False where another rank writes for this one."""
        self._threads, self._pages = threads, threads.pages
        self._most, self.enabled = most_tokens, enabled
        # Tokens that wait, written by two threads: what was handed over, and what has been seen to.
        self._handed = self._seen = 0
        # Tokens that were not even handed over.
        self._refused = 0
        # Advanced when what waits must not be written any more.
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Tokens."""
        return self._handed - self._seen

    @property
    def dropped(self) -> int:
        """Tokens since the start that were not written, nor were there."""
        return self._refused + self._threads.counters.dropped

    def add(self, names: Sequence[bytes], slots: torch.Tensor) -> Write:
        """Write the pages of ``slots``, int64 on the CPU, in their order."""
        write, tokens = Write(), len(slots)
        if not self.enabled:
            return write
        if self.waiting + tokens > self._most or self._threads.writing.pausing:
            write.lost = True
            self._refused += tokens
            return write
        self._handed += tokens
        pages = self._pages.numbers(slots)
        given_away, epoch = self._pages.given_away[pages], self._epoch
        self._threads.write(lambda buffer: self._run(write, names, pages, given_away, buffer, epoch))
        return write

    def forget(self) -> None:
        """Nothing that waits is written."""
        self._epoch += 1

    def _run(
        self,
        write: Write,
        names: Sequence[bytes],
        pages: np.ndarray,
        given_away: np.ndarray,
        buffer: torch.Tensor,
        epoch: int,
    ) -> None:
        page_size, counters, trouble = self._pages.page_size, self._threads.counters, self._threads.writing
        left = len(names) * page_size
        try:
            for name, page, times in zip(names, pages, given_away, strict=True):
                if self._epoch != epoch or trouble.pausing:
                    break
                counted = self._write_one(name.hex(), int(page), int(times), buffer)
                if counted == "dropped":
                    # Nobody could use what comes behind it.
                    break
                setattr(counters, counted, getattr(counters, counted) + page_size)
                left -= page_size
        except Exception as e:
            trouble.came(e)
            counters.failed += page_size
            counters.dropped -= page_size
        finally:
            write.lost = left > 0
            counters.dropped += left
            self._seen += len(names) * page_size

    def _write_one(self, key: str, page: int, given_away: int, buffer: torch.Tensor) -> str:
        """What became of it, as a counter is called."""
        files = self._threads.files
        if files.exists(key):
            return "known"
        self._pages.read(page, buffer)
        if self._pages.given_away[page] != given_away:
            return "dropped"
        if not files.set(key, buffer):
            return "dropped"
        self._threads.writing.ended()
        return "written"
