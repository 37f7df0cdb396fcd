"""One request's wait for a storage, and what threads do for it.

Upstream: none is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.host_tier.storage_keys import page_names

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Fetch", "look", "read_pages"]


@dataclass(eq=False)
class Fetch:
    """What one request waits for.

    tokens: its prompt up to what can be reused, whole pages, as the tree's `keys_of`. held: how many of these host
    memory had when it was asked, and before: what the last page of them is called; stored_in: `cleared` of host
    memory's tree then; worth: how many must be found.
    found: how many the storage has, from the start, 0 if too few, None while that is not known; the threads write that,
    ``names`` of pages from ``held`` on, ``come`` (pages read) and ``ended``.
    """

    rid: str
    watch: Watch | None
    host_watch: Watch | None
    tokens: Sequence[Any] = ()
    held: int = 0
    before: bytes = b""
    stored_in: int = 0
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
    # Nothing is written to its slots when it is closed.
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    @property
    def loading(self) -> bool:
        return self.begun > 0

    def close(self) -> None:
        """Nothing more is written to its slots. Takes as long as a page is copied, at most."""
        with self.lock:
            self.closed = True


def look(fetch: Fetch, threads: StorageThreads, page_size: int, beat: Callable[[], None]) -> None:
    """Find out how many pages the storage has behind what is held; by halving, since they came in order.

    beat: called before each call of the storage.
    """
    found = 0
    try:
        names = page_names(fetch.tokens[fetch.held :], page_size, fetch.before)
        low, high = 0, len(names)
        while low < high and not fetch.closed:
            beat()
            # First the last: most often there is all of it, or nothing.
            middle = high if high == len(names) else (low + high + 1) // 2
            if threads.files.exists(names[middle - 1].hex()):
                low = middle
            else:
                high = middle - 1
        fetch.names, tokens = names, fetch.held + low * page_size
        found = tokens if tokens >= fetch.worth else 0
    finally:
        fetch.found = found


def read_pages(
    fetch: Fetch,
    threads: StorageThreads,
    names: Sequence[bytes],
    pages: Sequence[int],
    buffer: torch.Tensor,
    beat: Callable[[], None],
) -> None:
    """Read pages into host memory, until one is not there, or nobody waits any more. buffer: room for one."""
    try:
        for name, page in zip(names, pages, strict=True):
            if fetch.closed:
                return
            beat()
            if threads.files.get(name.hex(), buffer) is None:
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
