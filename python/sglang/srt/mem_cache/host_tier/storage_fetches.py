"""What requests wait for before their handshake counts as done: pages of their prompts that a storage has.

A request asks when it comes. In threads, the storage is asked how much it has of what host memory lacks, and that is
read into host memory, where it enters the tree; from there on it is like all that has been saved there. The request
waits no longer than its prompt allows, and goes on with what has come by then. Others pass it, but for those that want
pages which it reads: they wait until it has ended, or until their own time is up.

What the ranks could see differently (answers, what has come, time) takes effect in `advance`, after one reduction.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.host_tier.storage_reads import (
    ENDED,
    LATE,
    UNDER_WAY,
    Fetch,
    look,
    read_pages,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.storage_threads import StorageThreads
    from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Fetches", "Limits"]

logger = logging.getLogger(__name__)

# Part of host memory that may be read into at once.
LOADING_PART = 1 / 2
# Requests that may wait at once; the others go without. It is part of the width of what TP ranks reduce.
MOST_OPEN = 512
# Requests for which one step begins to read; and figures by which it is decided on each.
MOST_BEGUN = 8
_FIGURES = 4


class Limits(NamedTuple):
    """threshold: tokens that are worth a fetch. base_s, per_ki_s: how long a request waits, and for 1024 tokens more.

    The engine's, with its defaults.
    """

    threshold: int = 256
    base_s: float = 1.0
    per_ki_s: float = 0.25


class Fetches:
    """The fetches of one rank. Those under way are the same on all ranks, in the same order."""

    def __init__(self, host: StoredHostTree, threads: StorageThreads, limits: Limits, cleared: Callable[[], int]):
        """cleared: how often the storage has been cleared here."""
        self._host, self._threads, self.limits, self._cleared = host, threads, limits, cleared
        self._page = host.page_size
        self._most = int(host.pool_size * LOADING_PART) // self._page * self._page
        self._least = max(limits.threshold, self._page)
        self.open: list[Fetch] = []
        self._waited_for: dict[str, Fetch] = {}
        # Which tokens of its prompt were fetched for a request that waits.
        self.brought: dict[str, tuple[int, int]] = {}

    # ---- requests ----

    def ask(self, rid: str, watch: Watch | None, host_watch: Watch | None, num_tokens: int) -> None:
        """Have the request ``rid`` wait for what the storage has, and neither tree, of a prompt of so many tokens.

        watch, host_watch: of the prompt, in the device's tree and in host memory's. All ranks open the same.
        """
        if num_tokens < self._least or len(self.open) >= MOST_OPEN or rid in self._waited_for:
            return
        fetch = Fetch(rid, watch, host_watch)
        try:
            if watch is None or host_watch is None or not self._put(fetch, watch, host_watch):
                fetch.found = 0
        except Exception as e:
            # Maybe on this rank only.
            logger.error("The storage of KV is not asked for %s", rid, exc_info=e)
            fetch.found = 0
        self.open.append(fetch)
        self._waited_for[rid] = fetch

    def _put(self, fetch: Fetch, watch: Watch, host_watch: Watch) -> bool:
        """Put the question; returns whether there was one."""
        page = self._page
        fetch.tokens = host_watch.token_ids[: len(host_watch.token_ids) // page * page]
        fetch.held, fetch.before = host_watch.length, self._host.name_at(host_watch)
        fetch.cleared = self._cleared()
        known = max(fetch.held, watch.length)
        lacks = len(fetch.tokens) - known
        if lacks < self._least or self._threads.reading.pausing:
            return False
        fetch.worth = known + self._least
        fetch.deadline = time.monotonic() + self.limits.base_s + self.limits.per_ki_s * lacks / 1024
        self._threads.look(lambda: look(fetch, self._threads, page))
        return True

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing."""
        return rid not in self._waited_for

    def leave(self, rid: str) -> None:
        """``rid`` has been admitted or is gone; on all ranks in the same step."""
        self.brought.pop(rid, None)
        fetch = self._waited_for.get(rid)
        if fetch is not None:
            self._close(fetch, 0)

    @property
    def loading_tokens(self) -> int:
        """Tokens of host memory that are being read into."""
        return sum(len(one.slots) for one in self.open if one.slots is not None)

    def locked(self) -> list[TreeNode]:
        """The nodes of host memory's tree that fetches have locked."""
        return [fetch.above for fetch in self.open if fetch.above is not None]

    # ---- a step ----

    def advance(self, group: Any, alone: bool) -> None:
        """Take note of what has been found and read, with the other ranks of ``group``. Once in a step, on all."""
        if not self.open:
            return
        now, watched = time.monotonic(), self.open[:]
        found = [one for one in watched if one.agreed is not None and not one.loading and not one.follows][:MOST_BEGUN]
        own = [fact for one in watched for fact in one.facts(now > one.deadline)]
        figures = self._figures(found)
        told = _least([*own, *figures, *(-figure for figure in figures)], group, alone)
        low, negated = told[len(own) : len(own) + len(figures)], told[len(own) + len(figures) :]
        # First, since these figures are from before.
        self._begin_some(found, low, [-figure for figure in negated])
        for i, fetch in enumerate(watched):
            if not fetch.closed:
                self._follow(fetch, told[2 * i], told[2 * i + 1])

    def _figures(self, found: Sequence[Fetch]) -> list[int]:
        """By what it is decided on those to be read next: of host memory, and four of each of them."""
        figures = [self._host.pool.available_size(), self._host.evictable_size()]
        for fetch in found:
            if fetch.host_watch is None or fetch.watch is None:
                figures += [-1] * _FIGURES
            else:
                held = fetch.host_watch.peek()
                figures += [fetch.held, held.length, held.evictable, fetch.watch.length]
        return figures

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
        """Where nothing has come it is left alone for a while, or each request would wait as long for nothing."""
        self._threads.counters.late += 1
        if not answered:
            self._threads.reading.came("it has not answered in time")

    def _end(self, fetch: Fetch, pages: int, late: bool) -> None:
        if late:
            self._note_late(answered=pages > 0 or fetch.failed)
        if pages:
            self.brought[fetch.rid] = fetch.start, fetch.start + pages * self._page
        self._close(fetch, pages)

    def _begin_some(self, found: Sequence[Fetch], low: Sequence[int], high: Sequence[int]) -> None:
        """Begin to read what was found, as far as there is room, or let requests go on.

        low, high: `_figures` of all ranks. Of what they differ in, nothing is read: they would hold different prefixes.
        """
        available, evictable = low[:2]
        locked = 0
        for i, fetch in enumerate(found):
            first = 2 + _FIGURES * i
            asked, held, unlocked, on_device = low[first : first + _FIGURES]
            same = low[:2] == high[:2] and low[first : first + _FIGURES] == high[first : first + _FIGURES]
            assert fetch.agreed is not None
            if not same or held < asked or fetch.agreed - max(held, on_device) < self._least:
                self._close(fetch, 0)
                continue
            fetch.reader = self._reader(fetch.names_of(held, self._page, self._page)[0])
            if fetch.reader is not None:
                continue
            room = self._most - sum(one.begun for one in self.open)
            if room < self._page:
                # It waits for others to end.
                return
            wanted = min(fetch.agreed - held, room)
            tokens = min(wanted, (available + evictable - locked - unlocked) // self._page * self._page)
            if tokens < wanted and locked:
                # What is locked for both has been taken off twice, maybe: the next step knows.
                return
            if tokens < self._page or held + tokens <= on_device:
                self._close(fetch, 0)
                continue
            # On all ranks, also where it fails.
            fetch.begun, fetch.start = tokens, held
            fetch.reading = frozenset(fetch.names_of(held, tokens, self._page))
            try:
                self._begin(fetch, held, tokens)
            except Exception as e:
                # Maybe on this rank only: all learn of it in the next step.
                logger.error("%d tokens cannot be fetched from the storage of KV", tokens, exc_info=e)
                fetch.failed = True
            if tokens > available:
                # What host memory has of the others may have gone for it.
                return
            available -= tokens
            locked += unlocked

    def _reader(self, name: bytes) -> Fetch | None:
        """Who reads the page of that name."""
        return next((one for one in self.open if name in one.reading), None)

    def _begin(self, fetch: Fetch, held: int, tokens: int) -> None:
        assert fetch.host_watch is not None
        host = self._host
        _, above = host.lock_prefix(fetch.host_watch.peek())
        fetch.above = above
        short = tokens - host.pool.available_size()
        if short > 0:
            host.evict_shortfall(short)
        slots = host.pool.alloc(tokens)
        if slots is None:
            raise RuntimeError(f"{tokens} tokens of host memory were to be had, and are not")
        fetch.slots = slots
        names = fetch.names_of(held, tokens, self._page)
        pages = [int(page) for page in self._threads.pages.numbers(slots)]
        self._threads.read(lambda buffer: read_pages(fetch, self._threads, names, pages, buffer))

    def give_up(self) -> None:
        """It is used no more: the requests that wait go on."""
        for fetch in self.open[:]:
            self._close(fetch, 0)

    def forget(self) -> None:
        """Host memory is about to be emptied."""
        for fetch in self.open:
            fetch.close()
        self.open.clear()
        self._waited_for.clear()
        self.brought.clear()

    def _close(self, fetch: Fetch, pages: int) -> None:
        """Its request goes on, with so many pages of what was read. Nothing more is written to its slots."""
        fetch.close()
        self.open.remove(fetch)
        del self._waited_for[fetch.rid]
        if fetch.slots is not None:
            if pages:
                self._enter(fetch, pages)
            # What has not come.
            self._free(fetch.slots[pages * self._page :])
        if fetch.above is not None:
            self._host.dec_lock_ref(fetch.above)
        # Its look-up may wait for a storage that hangs.
        fetch.tokens, fetch.names = (), []

    def _enter(self, fetch: Fetch, pages: int) -> None:
        """Put so many pages of what has been read, or those that are there already, into the tree of host memory."""
        assert fetch.slots is not None and fetch.above is not None and fetch.host_watch is not None
        end = pages * self._page
        slots, come = fetch.slots[:end], fetch.tokens[fetch.start : fetch.start + end]
        key = RadixKey(come, fetch.host_watch.extra_key, is_bigram=self._host.is_eagle)
        known, _ = self._host.insert_fetched(fetch.above, key, slots, fetch.cleared)
        # What came another way meanwhile.
        self._free(slots[:known])
        self._threads.counters.fetched += end

    def _free(self, slots: torch.Tensor) -> None:
        if len(slots):
            self._host.pool.free(slots)


def _least(facts: list[int], group: Any, alone: bool) -> list[int]:
    """The least of each over the ranks."""
    if alone:
        return facts
    reduced = torch.tensor(facts, dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    return reduced.tolist()
