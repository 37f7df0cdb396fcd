"""Radix caches whose pages are also kept in a PegaFlow server, which other engine processes on the machine share.

Upstream: not in the engine (PR #17221 was closed).
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.pegaflow_pages import first_hash, page_hashes
from sglang.srt.mem_cache.pegaflow_session import Load, Lookup, PegaFlowSession, Save
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

if TYPE_CHECKING:
    pass

__all__ = ["PegaFlowDecodeRadixCache", "PegaFlowRadixCache", "PegaFlowTree"]

# A question or a load that takes longer is a miss.
TIMEOUT_S = 5.0
# Part of the pool that may be held for saving, and part that may be loaded for requests not looked at since.
SAVING_PART = 1 / 8
LOADING_PART = 1 / 2
# Saves, and prefetches, that one step decides on, the oldest first: the width of what TP ranks reduce.
AGREED = 64
# A flush waits for what is under way: this often, this long each time.
DRAIN_ROUNDS, DRAIN_PAUSE_S = 500, 0.01


class Stage(enum.Enum):
    ASKED = "asked"
    FOUND = "found"
    LOADING = "loading"


@dataclass(eq=False)
class Prefetch:
    """What a request waits for.

    tokens: its prompt up to what can be reused, whole pages. The server was asked for what follows the first
    ``start``, and has ``pages`` pages of it. node: down to which the tree is locked while they are loaded.
    """

    rid: str
    tokens: list[int]
    extra_key: str | None
    priority: int
    start: int
    lookup: Lookup
    deadline: float
    stage: Stage = Stage.ASKED
    pages: int = 0
    load: Load | None = None
    node: TreeNode | None = None
    asked_for: bool = False
    left: bool = False
    given_up: bool = False


def _timed(method: Callable) -> Callable:
    """Adds the time of an outermost call to ``seconds``, the scheduler thread's share of this."""

    @functools.wraps(method)
    def timed(self: PegaFlowTree, *args: Any, **kwargs: Any) -> Any:
        if self._timing:
            return method(self, *args, **kwargs)
        start, self._timing = time.perf_counter(), True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._timing = False
            self.seconds += time.perf_counter() - start

    return timed


class PegaFlowTree(RadixCache):
    """What both caches add to their tree. All of it runs in the scheduler thread, and none of it waits.

    Each node knows the hashes of its pages, chained from the root. A new node is saved at once and locked until the
    server has read it. When a request arrives, the server is asked for what follows its match in the tree; what it has
    is loaded into pages that belong to nobody else and enters the tree when it is there.

    All that TP ranks could see differently (answers, what has been saved or loaded) takes effect in `advance`, after
    one reduction over the ranks, so that their trees stay the same.
    """

    session: PegaFlowSession
    attached = False
    tp_group: Any = None
    seconds = 0.0
    _timing = False
    _loaded_insert = False

    def attach(self, session: PegaFlowSession, tp_group: Any = None, saves: bool = True) -> None:
        """Begin to use ``session``; the tree must be empty.

        tp_group: the CPU group of the TP ranks, None for one rank. saves: False where another rank saves for this one.
        """
        self.attached, self.session, self.tp_group, self.saves = True, session, tp_group, saves
        size = self.token_to_kv_pool_allocator.size
        self._saving_limit, self._loading_limit = int(size * SAVING_PART), int(size * LOADING_PART)
        self._saves: list[tuple[Save, TreeNode]] = []
        self._saving_tokens = 0
        # Nodes that are to be saved when there is room for it; a set in order.
        self._unsaved: dict[TreeNode, None] = {}
        self._open: list[Prefetch] = []
        self._by_rid: dict[str, Prefetch] = {}
        # Tokens loaded for a request that has not been looked at since.
        self._ready: dict[str, int] = {}
        self._loading_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether pages are being saved or loaded, or the server has been asked."""
        return self.attached and bool(self._saves or self._open)

    def leave(self) -> None:
        """Stop using the server, as soon as nothing is under way: nothing new begins."""
        self.session.stop()

    def reset(self) -> None:
        assert not self.busy, "the tree is reset while the server reads or writes pages of it"
        super().reset()
        if self.attached:
            self._ready.clear()
            self._unsaved.clear()

    def protected_size(self) -> int:
        """Adds the pages that are being loaded, which nobody else can be given."""
        return super().protected_size() + (self._loading_tokens if self.attached else 0)

    def pegaflow_state(self) -> dict[str, Any]:
        if not self.attached:
            return {"attached": False}
        return {
            "attached": True,
            "up": self.session.up,
            **asdict(self.session.counters),
            "saving_tokens": self._saving_tokens,
            "loading_tokens": self._loading_tokens,
            "prefetches": len(self._open),
            "scheduler_seconds": self.seconds,
        }

    # ---- the tree's own changes ----

    def _record_store_event(self, node: TreeNode) -> None:
        """Adds to what is done with each new leaf that its pages get their hashes, and are saved."""
        super()._record_store_event(node)
        if self.attached:
            self._take_in(node)

    @_timed
    def _take_in(self, node: TreeNode) -> None:
        at_root = node.parent is self.root_node
        before = first_hash(node.key.extra_key) if at_root else node.parent.page_hashes[-1]
        node.page_hashes = page_hashes(node.key.token_ids, self.page_size, before)
        node.saved = self._loaded_insert
        if not node.saved:
            self._save(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """Adds that a node which could not be saved is saved when it is met again."""
        super()._inc_hit_count(node, chunked)
        if self.attached and not getattr(node, "saved", True):
            self._save(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Adds that the hashes are divided. A lock on ``child`` holds the upper part too."""
        upper = super()._split_node(key, child, split_len)
        if self.attached:
            pages = split_len // self.page_size
            upper.page_hashes, child.page_hashes = child.page_hashes[:pages], child.page_hashes[pages:]
            upper.saved = child.saved
            if child in self._unsaved:
                self._unsaved[upper] = None
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Adds that a node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.attached:
            self._unsaved.pop(node, None)

    # ---- saving ----

    @_timed
    def _save(self, node: TreeNode) -> None:
        """Have ``node`` saved, locked meanwhile; later, if that and others would hold too much of the pool."""
        tokens = len(node.key)
        if self._saving_tokens and self._saving_tokens + tokens > self._saving_limit:
            self._unsaved[node] = None
            return
        self._unsaved.pop(node, None)
        # Its slots are copied on every split, so these stay what they are.
        save = Save(node.value, node.page_hashes)
        node.saved = True
        self.inc_lock_ref(node)
        self._saving_tokens += tokens
        self._saves.append((save, node))
        if self.saves:
            self.session.save(save)
        else:
            save.done = save.saved = True

    def _end_save(self, save: Save, node: TreeNode, saved: bool) -> None:
        """Unlock what a save held. saved: on all ranks; else it is saved again when it is met again."""
        self._saves.remove((save, node))
        self._saving_tokens -= len(save.slots)
        node.saved = saved
        self.dec_lock_ref(node)

    # ---- loading ----

    @_timed
    def prefetch(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int = 0) -> None:
        """Ask the server for what the tree lacks of ``token_ids``, whole pages, for the request ``rid``."""
        if not self.attached or self.disable or rid in self._by_rid:
            return
        tokens = list(token_ids[: len(token_ids) // self.page_size * self.page_size])
        start, _, before = self._held(tokens, extra_key)
        if start == len(tokens):
            return
        lookup = Lookup(page_hashes(tokens[start:], self.page_size, before))
        deadline = time.monotonic() + TIMEOUT_S
        found = Prefetch(rid, tokens, extra_key, priority, start, lookup, deadline)
        self._open.append(found)
        self._by_rid[rid] = found
        self.session.ask(lookup)

    def _held(self, tokens: list[int], extra_key: str | None) -> tuple[int, TreeNode, bytes]:
        """How many of ``tokens`` the tree holds, the last node of them, and the hash of their last page.

        Nothing is split, and no access time changes.
        """
        held, node, before = 0, self.root_node, first_hash(extra_key)
        while held < len(tokens):
            key = RadixKey(tokens[held:], extra_key)
            child = node.children.get(self.get_child_key_fn(key))
            if child is None:
                break
            length = self.key_match_fn(child.key, key) // self.page_size * self.page_size
            if not length:
                break
            node, before = child, child.page_hashes[length // self.page_size - 1]
            held += length
            if length < len(child.key):
                break
        return held, node, before

    def check_prefetch_progress(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing. The engine asks before it matches a request for its batch."""
        found = self._by_rid.get(rid)
        if found is not None:
            found.asked_for = True
        return found is None

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Tokens that were loaded for ``rid``, which is now being matched."""
        return self._ready.pop(rid, 0)

    def release_aborted_request(self, rid: str) -> None:
        """``rid`` is gone. What is being loaded for it enters the tree all the same."""
        self._ready.pop(rid, None)
        found = self._by_rid.pop(rid, None)
        if found is not None:
            found.left = True

    @_timed
    def advance(self) -> None:
        """Take note of what has been saved, found and loaded. Called once per step, on all ranks."""
        if not self.busy:
            return
        now = time.monotonic()
        saves, watched = self._saves[:AGREED], self._open[:AGREED]
        facts = [save.done + save.saved if save.done else 0 for save, _ in saves]
        facts += [self._fact(found, now) for found in watched]
        # Decode comes to a request when its handshake is done, which each rank sees in a step of its own.
        facts += [found.asked_for for found in watched]
        if self.tp_group is not None:
            reduced = torch.tensor(facts, dtype=torch.int64)
            torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self.tp_group)
            facts = reduced.tolist()
        for (save, node), fact in zip(saves, facts, strict=False):
            if fact:
                self._end_save(save, node, fact == 2)
        while self._unsaved:
            node = next(iter(self._unsaved))
            self._save(node)
            if node in self._unsaved:
                break
        facts = facts[len(saves) :]
        asked_for = facts[len(watched) :]
        for found, fact, asked in zip(watched, facts, asked_for, strict=False):
            found.asked_for = bool(asked)
            self._decide(found, fact)
        for found in self._open:
            found.asked_for = False

    # Facts of a load; the least over the ranks is what counts. Of a question: -1, or how many pages were found.
    _UNDER_WAY, _LATE, _FAILED, _LOADED = range(4)

    def _fact(self, found: Prefetch, now: float) -> int:
        """What this rank knows of ``found``. Late is final for the request, not for the pages."""
        late = now > found.deadline
        if found.stage is Stage.ASKED:
            if found.lookup.hits is None and late:
                self.session.late()
                return 0
            return -1 if found.lookup.hits is None else found.lookup.hits
        if found.stage is Stage.LOADING:
            load = found.load
            assert load is not None
            if load.final:
                return self._FAILED if load.failed else self._LOADED
            if late and not load.failed and not found.given_up:
                self.session.late()
            return self._LATE if late or load.failed else self._UNDER_WAY
        return 0

    def _decide(self, found: Prefetch, fact: int) -> None:
        if found.stage is Stage.ASKED and fact >= 0:
            found.pages = fact
            if not fact or found.left:
                self._close(found)
                return
            found.stage = Stage.FOUND
        if found.stage is Stage.FOUND:
            if found.left or self.session.stopped:
                self._close(found)
            elif self._has_room(found):
                self._start_load(found)
        elif found.stage is Stage.LOADING:
            if fact == self._LATE:
                self._give_up(found)
            elif fact in (self._FAILED, self._LOADED):
                self._end_load(found, fact == self._LOADED)

    def _has_room(self, found: Prefetch) -> bool:
        """Whether its pages may be loaded now: else those loaded earlier would go before they are used.

        The first that the scheduler has come to since the last step may, alone, so that none waits for ever.
        """
        tokens = self._loading_tokens + sum(self._ready.values()) + found.pages * self.page_size
        return tokens <= self._loading_limit or (found.asked_for and not self._loading_tokens)

    def _start_load(self, found: Prefetch) -> None:
        """Give pages to what was found and still follows what the tree holds; without room for them it is a miss.

        Only from now on the tree is locked: if it were while requests wait for room, nobody might ever get any.
        """
        held, node, _ = self._held(found.tokens, found.extra_key)
        tokens = found.start + found.pages * self.page_size - held
        if held < found.start or tokens <= 0:
            self._close(found)
            return
        self.inc_lock_ref(node)
        found.node = node
        allocator = self.token_to_kv_pool_allocator
        short = tokens - allocator.available_size()
        if short > 0:
            self._evict_for_load(short)
        slots = allocator.alloc(tokens) if tokens <= allocator.available_size() else None
        if slots is None:
            self._close(found)
            return
        found.stage, found.deadline = Stage.LOADING, time.monotonic() + TIMEOUT_S
        self._loading_tokens += tokens
        found.load = self.session.load(found.lookup, slots, skip=(held - found.start) // self.page_size)
        found.start = held

    def _evict_for_load(self, tokens: int) -> None:
        self.evict(EvictParams(num_tokens=tokens))

    def _give_up(self, found: Prefetch) -> None:
        """Let the request go on without it. The pages stay with the server until it is done with them."""
        found.given_up = True
        self._unlock(found)
        if self._by_rid.get(found.rid) is found:
            del self._by_rid[found.rid]

    def _end_load(self, found: Prefetch, loaded: bool) -> None:
        assert found.load is not None
        slots = found.load.slots
        self._loading_tokens -= len(slots)
        if not loaded or found.given_up:
            self.token_to_kv_pool_allocator.free(slots)
            self._close(found)
            return
        start = found.start
        key = RadixKey(found.tokens[: start + len(slots)], found.extra_key)
        # The tree holds what comes before them, so of its slots only the number counts.
        before = torch.zeros(start, dtype=torch.int64, device=self.device)
        self._loaded_insert = True
        try:
            result = self.insert(InsertParams(key=key, value=torch.cat([before, slots]), priority=found.priority))
        finally:
            self._loaded_insert = False
        # What was computed here meanwhile.
        self.token_to_kv_pool_allocator.free(slots[: result.prefix_len - start])
        if not found.left:
            self._ready[found.rid] = len(slots)
        self._close(found)

    def _close(self, found: Prefetch) -> None:
        self._open.remove(found)
        if self._by_rid.get(found.rid) is found:
            del self._by_rid[found.rid]
        if found.load is None:
            self.session.drop(found.lookup)
        self._unlock(found)

    def _unlock(self, found: Prefetch) -> None:
        if found.node is not None:
            self.dec_lock_ref(found.node)
            found.node = None

    # ---- ends ----

    def drain(self) -> bool:
        """Wait for what is under way, at most some seconds. For a flush; whether nothing is any more."""
        for _ in range(DRAIN_ROUNDS):
            if not self.busy:
                return True
            self.advance()
            time.sleep(DRAIN_PAUSE_S)
        return not self.busy


class PegaFlowRadixCache(PegaFlowTree):
    """The cache of an aggregated server, and of a prefill worker."""

    take_over: Any = classmethod(DecodeRadixCache.take_over.__func__)  # type: ignore[attr-defined]


class PegaFlowDecodeRadixCache(PegaFlowTree, DecodeRadixCache):
    """The cache of a decode worker: what its tree evicts has been saved, and what is loaded need not be sent."""

    def _evict_for_load(self, tokens: int) -> None:
        self.evict_shortfall(tokens)
