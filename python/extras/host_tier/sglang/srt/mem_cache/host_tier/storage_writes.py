"""Writes pages of host memory to a storage, once each, in a thread that locks nothing.

After reading a page the thread checks that it was not freed meanwhile. So evictions do not wait for the storage, and
TP ranks hold the same pages although their storages differ in speed.

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
    """Pages handed over for writing; lost: at least one of them is not stored."""

    lost: bool = False


class Writes:
    """Writes of one rank. Pending tokens are bounded; writes beyond the bound are dropped."""

    def __init__(self, threads: StorageThreads, most_tokens: int, enabled: bool):
        """enabled: False if another rank writes for this one."""
        self._threads, self._pages = threads, threads.pages
        self._most, self.enabled = most_tokens, enabled
        # Pending tokens as two counters, one per thread: handed over, and processed.
        self._handed = self._seen = 0
        # Tokens dropped before they were handed over.
        self._refused = 0
        # Increased to cancel pending writes.
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Pending tokens."""
        return self._handed - self._seen

    @property
    def dropped(self) -> int:
        """Tokens since the start that were neither written nor stored already."""
        return self._refused + self._threads.counters.dropped

    def add(self, names: Sequence[bytes], slots: torch.Tensor) -> Write:
        """Write the pages of ``slots`` (int64 on the CPU) in order."""
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
        """Cancel pending writes."""
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
                    # Later pages are unusable without this one.
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
        """Returns the name of the counter that the page belongs to."""
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
