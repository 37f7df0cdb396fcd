"""Prefetches: the server is asked for a request's prompt, and the pages beyond the tree are loaded.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.page_names import first_hash, page_names
from sglang.srt.mem_cache.pegaflow.room import Room
from sglang.srt.mem_cache.pegaflow.session import Load, Lookup
from sglang.srt.mem_cache.prefix_reader import PrefixReader
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
    from sglang.srt.mem_cache.pegaflow.tree import PegaFlowTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Prefetch", "Prefetches", "Stage"]

# Seconds until a look-up or load counts as a miss, and until a load stops waiting for memory if all else is done.
TIMEOUT_S = 5.0
# Share of the pool that may hold pages loaded for requests that have not been matched since.
LOADING_PART = 1 / 2
# Requests that may wait at once; others do not wait. Part of the width of the TP reduction.
MOST_OPEN = 512
# Pages per look-up, at most: gRPC servers accept 4 MiB by default.
MOST_ASKED = 100_000
# Prompt tokens, about, that one step compares with the tree, and the least that a request counts as. Further requests
# are compared in the next steps.
COMPARED, COMPARED_LEAST = 1 << 16, 1 << 10
# Steps in which loads may join running ones. After that all of these end first, so that a request that has no memory
# beside loads gets a step without any.
ROUND_STEPS = 16
# More pages than any prompt has.
NEVER = 1 << 40


class Stage(enum.Enum):
    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"


@dataclass(eq=False)
class Prefetch:
    """The look-up and load of one request.

    tokens: the reusable prompt, whole pages. The server was asked for all of them in step ``asked_in`` and has
    ``pages`` pages. start: tokens that the tree held when the load began; node: the last of these, locked during it.
    """

    rid: str
    tokens: list[int]
    extra_key: str | None
    priority: int
    lookup: Lookup
    asked_in: int
    deadline: float
    stage: Stage = Stage.ASKED
    pages: int = 0
    start: int = 0
    load: Load | None = None
    node: TreeNode | None = None
    asked_for: bool = False
    left: bool = False
    given_up: bool = False
    # The step that last compared its prompt with the tree.
    looked_in: int = 0


class Prefetches:
    """Look-ups and loads of one tree. learn: `Saves.learn`, called with the result of each look-up."""

    def __init__(self, tree: PegaFlowTree, session: PegaFlowSession, learn: Callable[..., None]) -> None:
        self._tree, self._session, self._learn = tree, session, learn
        self._allocator, self._page = tree.token_to_kv_pool_allocator, tree.page_size
        self.reader = PrefixReader(tree)
        self._limit = int(self._allocator.size * LOADING_PART)
        self.open: list[Prefetch] = []
        self._waited_for: dict[str, Prefetch] = {}
        # By rid: tokens loaded for a request that has not been matched since.
        self.ready: dict[str, int] = {}
        self.loading_tokens = 0
        # Steps since the first of the running loads began.
        self._round = 0

    # ---- requests ----

    def ask(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int) -> None:
        """Look up ``token_ids``, whole pages. The request ``rid`` waits for those that the tree does not have."""
        page = self._page
        if rid in self._waited_for or len(self.open) >= MOST_OPEN:
            return
        tokens = list(token_ids[: len(token_ids) // page * page])
        if not tokens:
            return
        held, _, path, _ = self.reader.peek(tokens, extra_key)
        hashes = [name for node in path for name in node.page_names][: held // page]
        hashes += page_names(tokens[held:], page, hashes[-1] if hashes else first_hash(extra_key))
        lookup = Lookup(hashes[:MOST_ASKED])
        found = Prefetch(rid, tokens, extra_key, priority, lookup, self._tree.step, time.monotonic() + TIMEOUT_S)
        self.open.append(found)
        if held < len(tokens):
            self._waited_for[rid] = found
        else:
            # No request waits for it.
            found.left = True
        self._session.ask(lookup)

    def is_done(self, rid: str) -> bool:
        """Whether ``rid`` has no pending prefetch; also notes that the scheduler asked."""
        found = self._waited_for.get(rid)
        if found is not None:
            found.asked_for = True
        return found is None

    def leave(self, rid: str) -> None:
        """``rid`` has ended. Pages being loaded for it still enter the tree."""
        self.ready.pop(rid, None)
        found = self._waited_for.pop(rid, None)
        if found is not None:
            found.left = True

    def locked_nodes(self) -> list[TreeNode]:
        return [found.node for found in self.open if found.node is not None]

    def let_go(self) -> list[Load]:
        """Cancel everything; returns loads that the server may still be writing."""
        loads = [found.load for found in self.open if found.load is not None]
        for found in self.open:
            if found.load is None:
                self._session.drop(found.lookup)
        self.loading_tokens = 0
        self.open.clear()
        self._waited_for.clear()
        return loads

    # ---- a step ----

    # Facts, of which the minimum over ranks counts. Of a load: one of these. Of a look-up: -1, or pages found. Of a
    # result: whether the request still waits for memory.
    _UNDER_WAY, _LATE, _FAILED, _LOADED = range(4)

    def facts(self, watched: Sequence[Prefetch], now: float) -> list[int]:
        """This rank's facts in three parts, one entry each per prefetch: progress, first missing page, is waited for.

        On decode a request is waited for once its handshake is done; ranks see that in different steps.
        """
        known = [self._fact(found, now) for found in watched]
        return known + [self._missing(found) for found in watched] + [found.asked_for for found in watched]

    def act(self, watched: Sequence[Prefetch], facts: Sequence[int], room: Callable[[], Room]) -> None:
        """Act on the facts of all ranks. facts: as `facts` returns them, minimum over ranks."""
        count, spent = len(watched), 0
        each = zip(watched, facts[:count], facts[count : 2 * count], facts[2 * count :], strict=True)
        for found, fact, lacks, is_asked in sorted(each, key=lambda one: one[0].looked_in):
            if found.stage is Stage.LOADING:
                self._follow_load(found, fact)
            elif not self._is_settled(found, fact, lacks, bool(is_asked)) and spent < COMPARED:
                spent += self._decide(found, fact, lacks, bool(is_asked), room)
        for found in self.open:
            # Keep the note for those not compared in this step.
            found.asked_for &= found.stage is Stage.FOUND and found.looked_in != self._tree.step

    def end_step(self) -> None:
        """Called after `act`: count the steps since the first of the running loads began."""
        self._round = self._round + 1 if self.loading_tokens else 0

    def _fact(self, found: Prefetch, now: float) -> int:
        """This rank's progress of ``found``. A late request goes on for good; its pages may still arrive."""
        late = now > found.deadline
        if found.stage is Stage.ASKED:
            if found.lookup.hits is None and late:
                if not found.lookup.fetching:
                    self._session.late()
                return 0
            return -1 if found.lookup.hits is None else found.lookup.hits
        if found.stage is Stage.LOADING:
            load = found.load
            assert load is not None
            if load.final:
                return self._FAILED if load.failed else self._LOADED
            if late and not load.failed and not found.given_up:
                self._session.late()
            return self._LATE if late or load.failed else self._UNDER_WAY
        return not late

    def _missing(self, found: Prefetch) -> int:
        """The first page that the server does not have; `NEVER` if this rank has no answer."""
        lookup = found.lookup
        told = found.stage is Stage.ASKED and lookup.hits is not None and not lookup.failed
        return lookup.hits if told and lookup.hits is not None else NEVER

    def _follow_load(self, found: Prefetch, fact: int) -> None:
        if fact == self._LATE:
            self._give_up(found)
        elif fact in (self._FAILED, self._LOADED):
            self._end_load(found, fact == self._LOADED)

    def _is_settled(self, found: Prefetch, fact: int, missing: int, asked: bool) -> bool:
        """Whether there is no result to compare with the tree, yet or ever. Cost: the same for any prompt."""
        if found.stage is Stage.ASKED:
            if fact < 0:
                return True
            given_up = fact == 0 and missing >= NEVER
        else:
            if asked and found.deadline == math.inf:
                # From now on it waits for memory only.
                found.deadline = time.monotonic() + TIMEOUT_S
            given_up = found.left or not fact
        if given_up or self._session.stopped:
            self._close(found)
            return True
        return False

    def _decide(self, found: Prefetch, fact: int, missing: int, asked: bool, room: Callable[[], Room]) -> int:
        """Apply a result and begin its load if there is memory. Returns the cost in tokens compared."""
        found.looked_in = self._tree.step
        held, _, path, _ = self.reader.peek(found.tokens, found.extra_key)
        if found.stage is Stage.ASKED:
            self._learn(path, fact, missing, len(found.lookup.hashes), found.asked_in)
            found.stage, found.pages, found.deadline = Stage.FOUND, fact, math.inf
        node = path[-1] if path else self._tree.root_node
        tokens = found.pages * self._page - held
        if tokens <= 0 or tokens > self._allocator.size or found.left:
            self._close(found)
        elif self._is_its_turn(tokens, asked) and room().take(node, tokens):
            self._start_load(found, held, node, tokens)
        return held + COMPARED_LEAST

    def _is_its_turn(self, tokens: int, asked: bool) -> bool:
        """Whether ``tokens`` may be loaded now without evicting earlier loads before their use.

        The first prefetch that is waited for may load alone, so that none waits without end.
        """
        under_way = self.loading_tokens
        if self._round >= ROUND_STEPS:
            return False
        return under_way + sum(self.ready.values()) + tokens <= self._limit or (asked and not under_way)

    def _start_load(self, found: Prefetch, held: int, node: TreeNode, tokens: int) -> None:
        """Allocate pages behind the first ``held`` tokens, which end in ``node``, and begin to load into them.

        The tree is locked only now: locks held by requests that wait for memory could block each other for ever.
        """
        self._tree.inc_lock_ref(node)
        found.node = node
        allocator = self._allocator
        short = tokens - allocator.available_size()
        if short > 0:
            self._tree.evict_for_load(short)
        slots = allocator.alloc(tokens)
        if slots is None:
            raise RuntimeError("a load was begun beyond what the pool has")
        found.stage, found.start, found.deadline = Stage.LOADING, held, time.monotonic() + TIMEOUT_S
        self.loading_tokens += tokens
        found.load = self._session.load(found.lookup, slots, skip=held // self._page)

    def _give_up(self, found: Prefetch) -> None:
        """Let the request go on without the load. The server keeps the pages until it is done."""
        found.given_up = True
        self._unlock(found)
        if self._waited_for.get(found.rid) is found:
            del self._waited_for[found.rid]

    def _end_load(self, found: Prefetch, loaded: bool) -> None:
        assert found.load is not None
        slots = found.load.slots
        self.loading_tokens -= len(slots)
        if not loaded or found.given_up:
            self._allocator.free(slots)
            self._close(found)
            return
        start = found.start
        key = RadixKey(found.tokens[: start + len(slots)], found.extra_key)
        # The tree holds the tokens before `start`, so only the number of these slots counts.
        before = torch.zeros(start, dtype=torch.int64, device=self._tree.device)
        prefix_len = self._tree.insert_loaded(key, torch.cat([before, slots]), found.priority)
        # Pages computed here meanwhile.
        self._allocator.free(slots[: prefix_len - start])
        if not found.left:
            self.ready[found.rid] = len(slots)
        self._close(found)

    def _close(self, found: Prefetch) -> None:
        self.open.remove(found)
        if self._waited_for.get(found.rid) is found:
            del self._waited_for[found.rid]
        if found.load is None:
            self._session.drop(found.lookup)
        self._unlock(found)

    def _unlock(self, found: Prefetch) -> None:
        if found.node is not None:
            self._tree.dec_lock_ref(found.node)
            found.node = None
