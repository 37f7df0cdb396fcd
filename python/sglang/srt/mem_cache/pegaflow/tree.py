"""Radix caches whose pages are also kept in a PegaFlow server, which other engine processes on the machine share.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.known_prefixes import note_known
from sglang.srt.mem_cache.kv_event_namespaces import record_store
from sglang.srt.mem_cache.pegaflow.fenced import FencedPages
from sglang.srt.mem_cache.pegaflow.pages import first_hash, page_hashes
from sglang.srt.mem_cache.pegaflow.prefetches import Prefetches
from sglang.srt.mem_cache.pegaflow.room import NOBODY, Live, Room
from sglang.srt.mem_cache.pegaflow.saves import Saves
from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

__all__ = ["PegaFlowDecodeRadixCache", "PegaFlowRadixCache", "PegaFlowTree"]

# Saves that one step decides on, the oldest first. It is part of the width of what TP ranks reduce.
SAVES_AGREED = 64
# A flush waits for what is under way: this often, this long each time.
DRAIN_ROUNDS, DRAIN_PAUSE_S = 500, 0.01


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

    Each node knows the hashes of its pages, chained from the root. A new node is saved in the next step, or when the
    step that is to write it is over, and locked until the server has read it. When a request arrives, the server is
    asked for its prompt. What it has beyond the tree is loaded into pages that belong to nobody else, which enter the
    tree when all have come. What the tree has and the server lacks is saved, once more if need be.

    All that TP ranks could see differently (answers, what has been saved or loaded) takes effect in `advance`, after
    one reduction over the ranks, so that their trees stay the same.
    """

    session: PegaFlowSession
    saves: Saves
    prefetches: Prefetches
    fenced: FencedPages
    # The requests that hold KV; set by who knows them.
    live: Callable[[], Live] = staticmethod(lambda: NOBODY)
    attached = False
    tp_group: Any = None
    seconds = 0.0
    # Steps so far.
    step = 0
    # Steps over prompts, see `DecodeRadixCache`. Elsewhere all that enters the tree is there.
    writing = written = 0
    _timing = False
    _loaded_insert = False

    def attach(self, session: PegaFlowSession, tp_group: Any = None, saves: bool = True) -> None:
        """Begin to use ``session``; the tree must be empty.

        tp_group: the CPU group of the TP ranks, None for one rank. saves: False where another rank saves for this one.
        """
        self.attached, self.session, self.tp_group = True, session, tp_group
        self.saves = Saves(self, session, saves)
        self.prefetches = Prefetches(self, session, self.saves.learn)
        # What was under way when the tree was reset.
        self.fenced = FencedPages(self.token_to_kv_pool_allocator)
        self.step = 0

    @property
    def busy(self) -> bool:
        """Whether pages are being saved or loaded, or soon will be, or the server has been asked."""
        return self.attached and (self.saves.busy or bool(self.prefetches.open))

    def leave(self) -> None:
        """Stop using the server, as soon as nothing is under way: nothing new begins."""
        self.session.stop()

    def reset(self) -> None:
        if self.busy:
            raise RuntimeError("the tree is reset while the server reads or writes pages of it")
        super().reset()
        if self.attached:
            self.prefetches.ready.clear()

    @property
    def unreturned_tokens(self) -> int:
        """Tokens outside the tree that the server may write to, or has not read when the tree was reset."""
        return self.prefetches.loading_tokens + self.fenced.tokens

    def protected_size(self) -> int:
        """Adds the pages that nobody can be given."""
        return super().protected_size() + (self.unreturned_tokens if self.attached else 0)

    def nodes_in_use(self) -> list[TreeNode]:
        """The nodes that saves and loads have locked."""
        return [saving.nodes[0] for saving in self.saves.under_way] + self.prefetches.locked_nodes()

    def pegaflow_state(self) -> dict[str, Any]:
        """What the server has been asked and given, in pages, and what is under way, in tokens."""
        if not self.attached:
            return {"attached": False}
        return {
            "attached": True,
            "up": self.session.up,
            **asdict(self.session.counters),
            "saving_tokens": self.saves.tokens,
            "loading_tokens": self.prefetches.loading_tokens,
            "fenced_tokens": self.fenced.tokens,
            "prefetches": len(self.prefetches.open),
            "scheduler_seconds": self.seconds,
        }

    # ---- the tree's own changes ----

    def _record_store_event(self, node: TreeNode) -> None:
        """Events tell prompts with an extra_key apart, and a new leaf's pages are hashed and saved."""
        record_store(self, node, super()._record_store_event)
        if self.attached:
            self._take_in(node)

    @_timed
    def _take_in(self, node: TreeNode) -> None:
        at_root = node.parent is self.root_node
        before = first_hash(node.key.extra_key) if at_root else node.parent.page_hashes[-1]
        node.page_hashes = page_hashes(node.key.token_ids, self.page_size, before)
        # The step in which the server was known to have it, and what saves it now.
        node.saved, node.saving = (self.step if self._loaded_insert else None), None
        # The step that is to write it.
        node.writer = self.writing
        self.saves.want(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """A node which could not be saved is saved when it is met again."""
        super()._inc_hit_count(node, chunked)
        if self.attached and hasattr(node, "page_hashes"):
            self.saves.want(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """The hashes are divided, and both parts share what is known of saves."""
        upper = super()._split_node(key, child, split_len)
        if self.attached:
            pages = split_len // self.page_size
            upper.page_hashes, child.page_hashes = child.page_hashes[:pages], child.page_hashes[pages:]
            self.saves.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.attached:
            self.saves.on_removal(node)

    def insert_loaded(self, key: RadixKey, value: torch.Tensor, priority: int) -> int:
        """Insert what was loaded, which need not be saved; returns the tokens that the tree held before."""
        self._loaded_insert = True
        try:
            return self.insert(InsertParams(key=key, value=value, priority=priority)).prefix_len
        finally:
            self._loaded_insert = False

    def evict_for_load(self, tokens: int) -> None:
        """Make room for a load."""
        self.evict(EvictParams(num_tokens=tokens))

    # ---- what the engine asks of a tree whose prefixes come from elsewhere ----

    @_timed
    def prefetch(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int = 0) -> None:
        """Ask the server for ``token_ids``, whole pages. The request ``rid`` waits for what the tree lacks of them."""
        if self.attached and not self.disable and not self.session.stopped:
            self.prefetches.ask(rid, token_ids, extra_key, priority)

    def check_prefetch_progress(self, rid: str) -> bool:
        """Whether ``rid`` waits for nothing. The engine asks before it matches a request for its batch."""
        return self.prefetches.is_done(rid)

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Tokens that were loaded for ``rid``, which is now being matched."""
        return self.prefetches.ready.pop(rid, 0)

    def release_aborted_request(self, rid: str) -> None:
        """``rid`` is gone. What is being loaded for it enters the tree all the same."""
        self.prefetches.leave(rid)

    # ---- a step ----

    @_timed
    def advance(self) -> bool:
        """Take note of what has been saved, found and loaded. Called once per step, on all ranks.

        Returns whether requests may now be given more than before.
        """
        self.step += 1
        if not self.busy and not self.fenced.pages:
            return False
        free, now = self._free(), time.monotonic()
        saves, fenced, watched = self.saves.under_way[:SAVES_AGREED], self.fenced.pages[:], self.prefetches.open[:]
        facts: list[int] = [saving.save.done + saving.save.saved if saving.save.done else 0 for saving in saves]
        facts += [pages.is_done() for pages in fenced]
        facts = self._least(facts + self.prefetches.facts(watched, now))
        for saving, fact in zip(saves, facts, strict=False):
            if fact:
                self.saves.end(saving, fact == 2)
        for one, fact in zip(fenced, facts[len(saves) :], strict=False):
            if fact:
                self.fenced.give_back(one)
        room = functools.cache(lambda: Room(self, self.live()))
        self.prefetches.act(watched, facts[len(saves) + len(fenced) :], room)
        self.saves.start(room)
        self.prefetches.end_step()
        return self._free() > free

    def _least(self, facts: list[int]) -> list[int]:
        """The least of each fact over the TP ranks."""
        if self.tp_group is None:
            return facts
        reduced = torch.tensor(facts, dtype=torch.int64)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self.tp_group)
        return reduced.tolist()

    def _free(self) -> int:
        return self.token_to_kv_pool_allocator.available_size() + self.evictable_size()

    # ---- ends ----

    def drain(self) -> bool:
        """Wait for what is under way, at most some seconds. For a flush; whether nothing is any more."""
        for _ in range(DRAIN_ROUNDS):
            if not self.busy:
                return True
            self.advance()
            time.sleep(DRAIN_PAUSE_S)
        return not self.busy

    def fence(self) -> None:
        """Let go of what is under way, for a reset that does not wait for it, but for the pages; see `FencedPages`."""
        self.fenced.add([*self.prefetches.let_go(), *self.saves.let_go()])

    def keep_fenced(self) -> None:
        """Take what the server may still read or write out of an allocator that has been cleared, until it is done."""
        self.fenced.reserve()


class PegaFlowRadixCache(PegaFlowTree):
    """The cache of an aggregated server, and of a prefill worker."""

    take_over: Any = classmethod(DecodeRadixCache.take_over.__func__)  # type: ignore[attr-defined]


class PegaFlowDecodeRadixCache(PegaFlowTree, DecodeRadixCache):
    """The cache of a decode worker: what its tree evicts has been saved, and what is loaded need not be sent."""

    def insert_loaded(self, key: RadixKey, value: torch.Tensor, priority: int) -> int:
        """Adds that a prefill has it: most of what a server holds comes from one, and one that uses the same server
        need not compute the rest."""
        held = super().insert_loaded(key, value, priority)
        found = self.peek(key.token_ids, key.extra_key)
        last = found.path[-1]
        # If that goes on beyond it, no prefill need have the rest.
        note_known(last if found.in_last == len(last.key) else last.parent)
        return held

    def evict_for_load(self, tokens: int) -> None:
        """Replaces the base's, which may evict more than that."""
        self.evict_shortfall(tokens)
