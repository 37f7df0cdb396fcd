"""One request's wait for a storage, and what threads do for it.

Upstream: none is known.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier.storage_keys import page_names

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["ENDED", "LATE", "UNDER_WAY", "Fetch", "look", "read_pages"]

# How far a fetch is; of the ranks, the least counts. Late: it waits no longer.
LATE, UNDER_WAY, ENDED = range(3)


@dataclass(eq=False)
class Fetch:
    """What one request waits for.

    tokens: its prompt up to what can be reused, whole pages, as the tree's `keys_of`. held: how many of these host
    memory had when it was asked, and before: what the last page of them is called; cleared: how often the storage had
    been cleared here by then; worth: how many must be found.
    found: how many the storage has, from the start, 0 if too few, None while that is not known; the threads write that,
    ``names`` of pages from ``held`` on, ``come`` (pages read) and ``ended``.
    """

    rid: str
    watch: Watch | None
    host_watch: Watch | None
    tokens: Sequence[Any] = ()
    held: int = 0
    before: bytes = b""
    cleared: int = 0
    worth: int = 0
    deadline: float = 0.0
    found: int | None = None
    names: list[bytes] = field(default_factory=list)
    # What all ranks have found; and from then on, when it is being read: how many tokens, the same on all ranks, where
    # to, and behind which node, which is locked.
    agreed: int | None = None
    begun: int = 0
    above: TreeNode | None = None
    start: int = 0
    slots: torch.Tensor | None = None
    come: int = 0
    ended: bool = False
    failed: bool = False
    # The pages that are being read; and who reads the first one that it lacks, for which it waits.
    reading: frozenset[bytes] = frozenset()
    reader: Fetch | None = None
    # Nothing is written to its slots when it is closed.
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    @property
    def loading(self) -> bool:
        return self.begun > 0

    @property
    def follows(self) -> bool:
        """Whether another one still reads what it waits for."""
        return self.reader is not None and not self.reader.closed

    def facts(self, is_late: bool) -> tuple[int, int]:
        """What this rank knows: how far it is; and tokens found, or pages that have come. is_late: its time is up."""
        late = LATE if is_late else UNDER_WAY
        if self.loading:
            # In this order: what has ended has come. One that could not begin ends for all at once: until then the
            # ranks' memory differs.
            state = LATE if self.failed else ENDED if self.ended else late
            return state, self.come
        if self.agreed is None and self.found is not None:
            return ENDED, self.found
        return late, 0

    def names_of(self, start: int, tokens: int, page_size: int) -> list[bytes]:
        """What the pages are called of so many tokens from ``start`` on, of those that were found."""
        first = (start - self.held) // page_size
        return self.names[first : first + tokens // page_size]

    def close(self) -> None:
        """Nothing more is written to its slots. Takes as long as a page is copied, at most."""
        with self.lock:
            self.closed = True
        # Or each would keep all that came before it.
        self.reader = None


def look(fetch: Fetch, threads: StorageThreads, page_size: int) -> None:
    """Find out how many pages the storage has behind what is held; by halving, since they came in order.

    Without the first there is nothing to read, and no room to be made: others may have removed what was written first.
    """
    found = 0
    try:
        names = page_names(fetch.tokens[fetch.held :], page_size, fetch.before)
        low, high, middle = 0, len(names), 1
        while low < high and not fetch.closed:
            if threads.files.exists(names[middle - 1].hex()):
                low = middle
            else:
                high = middle - 1
            # Behind the first the last: most often there is all of it, or nothing.
            middle = high if high == len(names) else (low + high + 1) // 2
        fetch.names, tokens = names, fetch.held + low * page_size
        found = tokens if tokens >= fetch.worth else 0
    finally:
        fetch.found = found


def read_pages(
    fetch: Fetch, threads: StorageThreads, names: Sequence[bytes], pages: Sequence[int], buffer: torch.Tensor
) -> None:
    """Read pages into host memory, until one is not there, or nobody waits any more. buffer: room for one."""
    try:
        for name, page in zip(names, pages, strict=True):
            if fetch.closed or threads.files.get(name.hex(), buffer) is None:
                return
            threads.reading.ended()
            if not _take_in(fetch, threads, page, buffer):
                return
    finally:
        fetch.ended = True


def _take_in(fetch: Fetch, threads: StorageThreads, page: int, buffer: torch.Tensor) -> bool:
    """Put what was read into a page of host memory; returns whether that is still the fetch's."""
    with fetch.lock:
        if fetch.closed:
            return False
        threads.pages.write(page, buffer)
        fetch.come += 1
    return True
