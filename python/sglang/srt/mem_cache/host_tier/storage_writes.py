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
    """Pages to be written: names, numbers in host memory, how often each had been given away by then.

    above: what writes the pages before these, None when this one has ended. lost: whether one of them was not written,
    nor is there; no_room: since the storage was full.
    """

    names: Sequence[bytes]
    pages: np.ndarray
    given_away: np.ndarray
    above: Write | None = None
    lost: bool = False
    no_room: bool = False


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
        # Advanced when what waits must not be written any more, and when what was written has been removed.
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Tokens."""
        return self._handed - self._seen

    @property
    def dropped(self) -> int:
        """Tokens since the start that were not written, nor were there, but those that it had no room for."""
        return self._refused + self._threads.counters.dropped

    def add(self, names: Sequence[bytes], slots: torch.Tensor, above: Write | None = None) -> Write:
        """Write the pages of ``slots``, int64 on the CPU, in their order. above: of the pages before them."""
        pages = self._pages.numbers(slots)
        write = Write(names, pages, self._pages.given_away[pages])
        tokens = len(slots)
        if not self.enabled:
            return write
        if self.waiting + tokens > self._most or self._threads.writing.pausing:
            write.lost = True
            self._refused += tokens
            return write
        self._handed += tokens
        write.above, epoch = above, self._epoch
        self._threads.write(lambda buffer: self._run(write, buffer, epoch))
        return write

    def forget(self) -> None:
        """Nothing that waits is written."""
        self._epoch += 1

    def _run(self, write: Write, buffer: torch.Tensor, epoch: int) -> None:
        page_size, counters, trouble = self._pages.page_size, self._threads.counters, self._threads.writing
        left = len(write.names) * page_size
        # Or each would keep all that came before it.
        above, write.above = write.above, None
        try:
            # Nobody could use what comes behind a page that found no room.
            write.no_room = above is not None and above.no_room
            for name, page, given_away in zip(write.names, write.pages, write.given_away, strict=True):
                if self._epoch != epoch or trouble.pausing or write.no_room:
                    break
                counted = self._write_one(name.hex(), int(page), int(given_away), buffer)
                write.no_room = counted == "no_room"
                if write.no_room:
                    break
                setattr(counters, counted, getattr(counters, counted) + page_size)
                write.lost = write.lost or counted == "dropped"
                left -= page_size
        except Exception as e:
            trouble.came(e)
            counters.failed += page_size
            left -= page_size
            # Also where it was the last of them.
            write.lost = True
        finally:
            write.lost = write.lost or left > 0
            if write.no_room:
                counters.no_room += left
            else:
                counters.dropped += left
            self._seen += len(write.names) * page_size

    def _write_one(self, key: str, page: int, given_away: int, buffer: torch.Tensor) -> str:
        """What became of it, as a counter is called."""
        files = self._threads.files
        if files.exists(key):
            files.note_use(key)
            return "known"
        self._pages.read(page, buffer)
        if self._pages.given_away[page] != given_away:
            return "dropped"
        if not files.set(key, buffer):
            return "no_room"
        self._threads.writing.ended()
        return "written"
