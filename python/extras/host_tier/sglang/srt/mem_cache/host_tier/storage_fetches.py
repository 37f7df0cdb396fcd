"""Fetches: requests wait for pages of their prompt from a storage before their handshake counts as done.

On arrival of a request, threads look up how much the storage has beyond host memory and read that into host memory,
where it enters the tree like saved KV. The wait is bounded by the prompt's length; then the request goes on with the
pages read so far. Other requests bypass it, except those that need pages it is reading: they wait until it has ended
or until their own deadline.

Results that may differ between ranks (answers, pages read, time) take effect in `advance`, after one reduction.

Upstream: none is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.page_names import page_names
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
    from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Fetch", "Fetches", "Limits", "read_pages"]

# Share of host memory that may be read into at once.
LOADING_PART = 1 / 2
# Requests that may wait at once; others do not wait. Part of the width of the TP reduction.
MOST_OPEN = 512
# Reads begun per step, at most.
MOST_BEGUN = 8
# Progress of a fetch; the minimum over ranks counts. LATE: past its deadline.
LATE, UNDER_WAY, ENDED = range(3)


class Limits(NamedTuple):
    """threshold: least tokens worth a fetch. base_s, per_ki_s: seconds to wait, and more per 1024 tokens.

    The engine's, with its defaults.
    """

    threshold: int = 256
    base_s: float = 1.0
    per_ki_s: float = 0.25


@dataclass(eq=False)
class Fetch:
    """The pending fetch of one request.

    tokens: the reusable prompt in whole pages, as the tree's `keys_of`. held: tokens in host memory at the look-up.
    before: name of the last page of these. worth: least tokens to find. found: tokens in the storage, from the
    prompt's start; 0 if too few, None until known. Threads write ``found``, ``names`` (of pages from ``held`` on),
    ``come`` (pages read) and ``ended``.
    """

    rid: str
    watch: Watch | None
    host_watch: Watch | None
    tokens: Sequence[Any] = ()
    held: int = 0
    before: bytes = b""
    worth: int = 0
    deadline: float = 0.0
    found: int | None = None
    names: list[bytes] = field(default_factory=list)
    # Tokens that all ranks have found. While reading: tokens (the same on all ranks), slots, and the locked node
    # below which they are inserted.
    agreed: int | None = None
    begun: int = 0
    above: TreeNode | None = None
    start: int = 0
    slots: torch.Tensor | None = None
    come: int = 0
    ended: bool = False
    # Names of pages being read; the fetch that already reads its first page, for which it waits.
    reading: frozenset[bytes] = frozenset()
    reader: Fetch | None = None
    # Guards its slots: nothing is written to them after `close`.
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    @property
    def loading(self) -> bool:
        return self.begun > 0

    @property
    def follows(self) -> bool:
        """Whether it still waits for another fetch."""
        return self.reader is not None and not self.reader.closed

    def facts(self, is_late: bool) -> tuple[int, int]:
        """This rank's progress, and tokens found or pages read. is_late: past the deadline."""
        late = LATE if is_late else UNDER_WAY
        if self.loading:
            # In this order: `ended` is set after the last page is counted.
            return (ENDED if self.ended else late), self.come
        if self.agreed is None and self.found is not None:
            return ENDED, self.found
        return late, 0

    def names_of(self, start: int, tokens: int, page_size: int) -> list[bytes]:
        """Names of the found pages of ``tokens`` tokens from ``start`` on."""
        first = (start - self.held) // page_size
        return self.names[first : first + tokens // page_size]

    def close(self) -> None:
        """Stop writes to its slots. Takes at most as long as the copy of a page."""
        with self.lock:
            self.closed = True
        # Without this, each would keep all earlier ones alive.
        self.reader = None


class Fetches:
    """The fetches of one rank. Open fetches are the same on all ranks, in the same order."""

    def __init__(self, host: StoredHostTree, threads: StorageThreads, limits: Limits):
        self._host, self._threads, self.limits = host, threads, limits
        self._page = host.page_size
        self._most = int(host.pool_size * LOADING_PART) // self._page * self._page
        self._least = max(limits.threshold, self._page)
        self.open: list[Fetch] = []
        self._waited_for: dict[str, Fetch] = {}
        # Range of prompt tokens fetched, by rid of the waiting request.
        self.brought: dict[str, tuple[int, int]] = {}

    # ---- requests ----

    def ask(self, rid: str, watch: Watch | None, host_watch: Watch | None, num_tokens: int) -> None:
        """Fetch what the storage has, and neither tree, of the prompt of ``rid`` with ``num_tokens`` tokens.

        watch, host_watch: of the prompt, in the device's and the host tree. All ranks open the same fetches.
        """
        if num_tokens < self._least or len(self.open) >= MOST_OPEN or rid in self._waited_for:
            return
        fetch = Fetch(rid, watch, host_watch)
        if watch is None or host_watch is None or not self._put(fetch, watch, host_watch):
            fetch.found = 0
        self.open.append(fetch)
        self._waited_for[rid] = fetch

    def _put(self, fetch: Fetch, watch: Watch, host_watch: Watch) -> bool:
        """Start the look-up; returns False if none is worthwhile."""
        page = self._page
        fetch.tokens = host_watch.token_ids[: len(host_watch.token_ids) // page * page]
        fetch.held, fetch.before = host_watch.length, self._host.name_at(host_watch)
        known = max(fetch.held, watch.length)
        lacks = len(fetch.tokens) - known
        if lacks < self._least or self._threads.reading.pausing:
            return False
        fetch.worth = known + self._least
        fetch.deadline = time.monotonic() + self.limits.base_s + self.limits.per_ki_s * lacks / 1024
        self._threads.look(lambda: look(fetch, self._threads, page))
        return True

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` has no pending fetch."""
        return rid not in self._waited_for

    def leave(self, rid: str) -> None:
        """``rid`` was admitted or has ended; called on all ranks in the same step."""
        self.brought.pop(rid, None)
        fetch = self._waited_for.get(rid)
        if fetch is not None:
            self._close(fetch, 0)

    @property
    def loading_tokens(self) -> int:
        """Tokens of host memory being read into."""
        return sum(len(one.slots) for one in self.open if one.slots is not None)

    def locked(self) -> list[TreeNode]:
        return [fetch.above for fetch in self.open if fetch.above is not None]

    # ---- a step ----

    def advance(self, group: Any, alone: bool) -> None:
        """Apply what was found and read, agreed with the other ranks of ``group``. Once per step on all ranks."""
        if not self.open:
            return
        now, watched = time.monotonic(), self.open[:]
        told = _least([fact for one in watched for fact in one.facts(now > one.deadline)], group, alone)
        for i, fetch in enumerate(watched):
            self._follow(fetch, told[2 * i], told[2 * i + 1])
        found = [one for one in self.open if one.agreed is not None and not one.loading and not one.follows]
        for fetch in found[:MOST_BEGUN]:
            if not self._read_next(fetch):
                return

    def _follow(self, fetch: Fetch, state: int, told: int) -> None:
        if state == UNDER_WAY:
            return
        if fetch.loading:
            self._end(fetch, told, late=state == LATE)
        elif state == ENDED:
            fetch.agreed = told
            if told < self._page:
                self._close(fetch, 0)
        else:
            self._note_late(answered=fetch.agreed is not None)
            self._close(fetch, 0)

    def _note_late(self, answered: bool) -> None:
        """Pauses the storage if nothing was read; otherwise each request would wait as long for nothing."""
        self._threads.counters.late += 1
        if not answered:
            self._threads.reading.came("it has not answered in time")

    def _end(self, fetch: Fetch, pages: int, late: bool) -> None:
        if late:
            self._note_late(answered=pages > 0)
        if pages:
            self.brought[fetch.rid] = fetch.start, fetch.start + pages * self._page
        self._close(fetch, pages)

    def _read_next(self, fetch: Fetch) -> bool:
        """Begin to read what was found, as space allows, or end the fetch. Returns whether others may begin too."""
        assert fetch.agreed is not None and fetch.host_watch is not None and fetch.watch is not None
        held, on_device = fetch.host_watch.length, fetch.watch.length
        if held < fetch.held or fetch.agreed - max(held, on_device) < self._least:
            self._close(fetch, 0)
            return True
        fetch.reader = self._reader(fetch.names_of(held, self._page, self._page)[0])
        if fetch.reader is not None:
            return True
        room = self._most - sum(one.begun for one in self.open)
        if room < self._page:
            # It waits until other fetches end.
            return False
        host, locked = self._host, fetch.host_watch.peek().evictable
        free = (host.pool.available_size() + host.evictable_size() - locked) // self._page * self._page
        tokens = min(fetch.agreed - held, room, free)
        if tokens < self._page or held + tokens <= on_device:
            self._close(fetch, 0)
            return True
        fits = tokens <= host.pool.available_size()
        self._begin(fetch, held, tokens)
        # One eviction per step.
        return fits

    def _reader(self, name: bytes) -> Fetch | None:
        return next((one for one in self.open if name in one.reading), None)

    def _begin(self, fetch: Fetch, held: int, tokens: int) -> None:
        """Read ``tokens`` tokens behind the ``held`` ones. An exception ends the worker, on all ranks alike."""
        assert fetch.host_watch is not None
        host = self._host
        fetch.begun, fetch.start = tokens, held
        _, fetch.above = host.lock_prefix(fetch.host_watch.peek())
        short = tokens - host.pool.available_size()
        if short > 0:
            host.evict_shortfall(short)
        slots = host.pool.alloc(tokens)
        if slots is None:
            raise RuntimeError(f"cannot allocate {tokens} tokens of host memory")
        fetch.slots = slots
        names = fetch.names_of(held, tokens, self._page)
        fetch.reading = frozenset(names)
        pages = [int(page) for page in self._threads.pages.numbers(slots)]
        self._threads.read(lambda buffer: read_pages(fetch, self._threads, names, pages, buffer))

    def give_up(self) -> None:
        """Close all fetches: the storage is stopped, and waiting requests go on."""
        for fetch in self.open[:]:
            self._close(fetch, 0)

    def forget(self) -> None:
        """Host memory is about to be cleared."""
        for fetch in self.open:
            fetch.close()
        self.open.clear()
        self._waited_for.clear()
        self.brought.clear()

    def _close(self, fetch: Fetch, pages: int) -> None:
        """End the fetch and keep ``pages`` of the pages read. Nothing more is written to its slots."""
        fetch.close()
        self.open.remove(fetch)
        del self._waited_for[fetch.rid]
        if fetch.slots is not None:
            if pages:
                self._enter(fetch, pages)
            # Pages not read.
            self._free(fetch.slots[pages * self._page :])
        if fetch.above is not None:
            self._host.dec_lock_ref(fetch.above)
        # A look-up in a hung storage may keep the fetch alive.
        fetch.tokens, fetch.names = (), []

    def _enter(self, fetch: Fetch, pages: int) -> None:
        """Insert the first ``pages`` pages read into the host tree, except those it has by now."""
        assert fetch.slots is not None and fetch.above is not None and fetch.host_watch is not None
        end = pages * self._page
        slots, come = fetch.slots[:end], fetch.tokens[fetch.start : fetch.start + end]
        key = RadixKey(come, fetch.host_watch.extra_key, is_bigram=self._host.is_eagle)
        known, _ = self._host.insert_fetched(fetch.above, key, slots)
        # Inserted by others meanwhile.
        self._free(slots[:known])
        self._threads.counters.fetched += end

    def _free(self, slots: torch.Tensor) -> None:
        if len(slots):
            self._host.pool.free(slots)


def _least(facts: list[int], group: Any, alone: bool) -> list[int]:
    """Minimum of each over the ranks."""
    if alone:
        return facts
    reduced = torch.tensor(facts, dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    return reduced.tolist()


# ---- what threads do for a fetch ----


def look(fetch: Fetch, threads: StorageThreads, page_size: int) -> None:
    """Count the pages the storage has behind ``held``, by bisection: pages are written in order.

    Without the first page nothing can be read, so it is checked first: it may have been removed before later ones.
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
            # After the first the last: usually all or none are stored.
            middle = high if high == len(names) else (low + high + 1) // 2
        fetch.names, tokens = names, fetch.held + low * page_size
        found = tokens if tokens >= fetch.worth else 0
    finally:
        fetch.found = found


def read_pages(
    fetch: Fetch, threads: StorageThreads, names: Sequence[bytes], pages: Sequence[int], buffer: torch.Tensor
) -> None:
    """Read pages into host memory until one is missing or the fetch is closed. buffer: for one page."""
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
    """Copy the buffer into a page of host memory; returns False if the fetch is closed."""
    with fetch.lock:
        if fetch.closed:
            return False
        threads.pages.write(page, buffer)
        fetch.come += 1
    return True
