"""Radix caches whose pages are also kept in a PegaFlow server, shared by the engine processes on the machine.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.known_prefixes import note_known
from sglang.srt.mem_cache.kv_event_namespaces import record_store
from sglang.srt.mem_cache.node_saves import SavingTree
from sglang.srt.mem_cache.pegaflow.prefetches import Prefetches
from sglang.srt.mem_cache.pegaflow.room import NOBODY, Live, Room, live_on_decode
from sglang.srt.mem_cache.pegaflow.saves import Saves
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.tier import Tier

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.pegaflow.session import Load, PegaFlowSession, Save

__all__ = ["PegaFlowDecodeRadixCache", "PegaFlowRadixCache", "PegaFlowTree"]

logger = logging.getLogger(__name__)

# Saves completed per step, oldest first. Part of the width of the TP reduction.
SAVES_AGREED = 64
# A flush waits for running saves and loads: number of checks, and seconds between them.
DRAIN_ROUNDS, DRAIN_PAUSE_S = 500, 0.01


class PegaFlowTree(SavingTree, Tier):
    """A radix cache that is also its own tier, with the server below it.

    All of it runs in the scheduler thread without waiting. Nodes have the names of their pages. A new node is saved in
    the next step, or after the step that writes it. When a request arrives, the server is asked for its prompt. Pages
    beyond the tree are loaded into newly allocated slots and enter the tree once all have arrived. Nodes that the
    server does not have are saved, again if necessary.

    Results that may differ between TP ranks (answers, completed saves and loads) take effect in `advance`, after one
    reduction, so that the ranks' trees stay the same.
    """

    name = "a PegaFlow server"
    session: PegaFlowSession
    prefetches: Prefetches
    saves: Saves | None = None
    # The requests that hold KV; set by the scheduler or decode's queue.
    live: Callable[[], Live] = staticmethod(lambda: NOBODY)
    tp_group: Any = None
    # Steps so far.
    step = 0
    # Prefill steps, see `DecodeRadixCache`. In the other cache all KV in the tree is already written.
    writing = written = 0
    # Whether the current insertion comes from the server.
    inserts_loaded = False

    def attach(self, session: PegaFlowSession, tp_group: Any = None, saves: bool = True) -> None:
        """Start using ``session``; the tree must be empty.

        tp_group: CPU group of the TP ranks, None for one rank. saves: False if another rank saves for this one.
        """
        self.session, self.tp_group = session, tp_group
        self.saves = Saves(self, session, saves)
        self.prefetches = Prefetches(self, session, self.saves.learn)
        # Saves and loads that were running when the tree was reset. Their pages stay out of the pool until the server
        # is done with them.
        self.fenced: list[Save | Load] = []
        self.step = 0

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return self

    @property
    def busy(self) -> bool:
        """Whether saves or loads are running or pending, or a look-up is."""
        return self.saves is not None and (self.saves.busy or bool(self.prefetches.open))

    def stop(self) -> None:
        """Stop using the server for good: the weights have changed."""
        if not self.session.stopped:
            logger.warning(
                "The weights were updated: this worker no longer uses PegaFlow. Restart it to use PegaFlow again."
            )
            self.session.stop()

    def reset(self) -> None:
        if self.busy:
            raise RuntimeError("the tree is reset while the server reads or writes pages of it")
        super().reset()
        if self.saves is not None:
            self.prefetches.ready.clear()

    @property
    def unreturned_tokens(self) -> int:
        """Tokens outside the tree that the server may write to, or may still read after a reset."""
        return 0 if self.saves is None else self.prefetches.loading_tokens + self.fenced_tokens

    @property
    def fenced_tokens(self) -> int:
        return sum(len(one.slots) for one in self.fenced)

    def protected_size(self) -> int:
        """Adds pages that cannot be allocated."""
        return super().protected_size() + self.unreturned_tokens

    def nodes_in_use(self) -> list[TreeNode]:
        return [] if self.saves is None else self.saves.locked() + self.prefetches.locked_nodes()

    def pegaflow_state(self) -> dict[str, Any]:
        """Totals in pages, and running work in tokens."""
        assert self.saves is not None
        return {
            "up": self.session.up,
            **asdict(self.session.counters),
            "saving_tokens": self.saves.tokens,
            "loading_tokens": self.prefetches.loading_tokens,
            "fenced_tokens": self.fenced_tokens,
            "prefetches": len(self.prefetches.open),
        }

    def insert_loaded(self, key: RadixKey, value: torch.Tensor, priority: int) -> int:
        """Insert loaded pages, which need not be saved; returns the tokens that the tree held before."""
        self.inserts_loaded = True
        try:
            return self.insert(InsertParams(key=key, value=value, priority=priority)).prefix_len
        finally:
            self.inserts_loaded = False

    def evict_for_load(self, tokens: int) -> None:
        """Evict ``tokens`` tokens for a load."""
        self.evict(EvictParams(num_tokens=tokens))

    # ---- for admission on decode ----

    def know_live(self, live: Callable[[], LiveReqs], growth: Callable[[LiveReqs], int]) -> None:
        self.live = lambda: live_on_decode(live(), growth)

    def fetch(self, req: Req, entry: QueueEntry) -> None:
        self.prefetch(req.rid, req.origin_input_ids, req.extra_key, req.priority or 0)

    def is_done(self, rid: str) -> bool:
        return self.prefetches.is_done(rid)

    def leave(self, rid: str) -> None:
        """Pages being loaded for it still enter the tree."""
        self.prefetches.leave(rid)

    # ---- the engine's hooks for prefetched prefixes ----

    def prefetch(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int = 0) -> None:
        """Look up ``token_ids``, whole pages. The request ``rid`` waits for those that the tree does not have."""
        if self.saves is not None and not self.disable and not self.session.stopped:
            self.prefetches.ask(rid, token_ids, extra_key, priority)

    check_prefetch_progress = is_done

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Tokens that were loaded for ``rid``, which is now being matched."""
        return self.prefetches.ready.pop(rid, 0)

    release_aborted_request = leave

    # ---- a step ----

    def advance(self) -> bool:
        """Apply completed saves, look-ups and loads. Called once per step on all ranks.

        Returns whether more memory is available to requests than before.
        """
        assert self.saves is not None
        self.step += 1
        if not self.busy and not self.fenced:
            return False
        free, now = self._free(), time.monotonic()
        saves, fenced, watched = self.saves.under_way[:SAVES_AGREED], self.fenced[:], self.prefetches.open[:]
        facts: list[int] = [saving.copy.done + saving.copy.saved if saving.copy.done else 0 for saving in saves]
        facts += [pages.is_done() for pages in fenced]
        facts = self._least(facts + self.prefetches.facts(watched, now))
        for saving, fact in zip(saves, facts, strict=False):
            if fact:
                self.saves.end(saving, self.step if fact == 2 else None)
        for one, fact in zip(fenced, facts[len(saves) :], strict=False):
            if fact:
                self.fenced.remove(one)
                self.token_to_kv_pool_allocator.free(one.slots)
        room = functools.cache(lambda: Room(self, self.live()))
        self.prefetches.act(watched, facts[len(saves) + len(fenced) :], room)
        self.saves.start(room)
        self.prefetches.end_step()
        return self._free() > free

    def _least(self, facts: list[int]) -> list[int]:
        """Minimum of each fact over the TP ranks."""
        if self.tp_group is None:
            return facts
        reduced = torch.tensor(facts, dtype=torch.int64)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self.tp_group)
        return reduced.tolist()

    def _free(self) -> int:
        return self.token_to_kv_pool_allocator.available_size() + self.evictable_size()

    # ---- ends ----

    def drain(self) -> bool:
        """Wait some seconds, for a flush, until nothing is running; returns whether that is so."""
        for _ in range(DRAIN_ROUNDS):
            if not self.busy:
                return True
            self.advance()
            time.sleep(DRAIN_PAUSE_S)
        return not self.busy

    def fence(self) -> None:
        """Cancel running saves and loads for a reset; their pages stay reserved for the server."""
        assert self.saves is not None
        self.fenced += [*self.prefetches.let_go(), *self.saves.let_go()]

    def keep_fenced(self) -> None:
        """Reserve the pages in use by the server in an allocator that has been cleared."""
        if not self.fenced:
            return
        pool = self.token_to_kv_pool_allocator
        pages = torch.cat([one.slots for one in self.fenced]) // pool.page_size
        pool.free_pages = pool.free_pages[~torch.isin(pool.free_pages, pages)]
        pool.release_pages = pool.release_pages[~torch.isin(pool.release_pages, pages)]


class PegaFlowRadixCache(PegaFlowTree):
    """The cache of an aggregated server or a prefill worker."""

    take_over: Any = classmethod(DecodeRadixCache.take_over.__func__)  # type: ignore[attr-defined]

    def _record_store_event(self, node: TreeNode) -> None:
        """Separates prompts with an extra_key in KV events."""
        record_store(self, node, super()._record_store_event)


class PegaFlowDecodeRadixCache(PegaFlowTree, DecodeRadixCache):
    """The cache of a decode worker: evicted KV was saved, and loaded KV need not be transferred."""

    def insert_loaded(self, key: RadixKey, value: torch.Tensor, priority: int) -> int:
        """Marks the prefix as known to a prefill: most KV in a server comes from one, and a prefill that uses the same
        server need not compute it."""
        held = super().insert_loaded(key, value, priority)
        found = self.peek(key.token_ids, key.extra_key)
        last = found.path[-1]
        # If the node extends beyond the prefix, its rest may be unknown to prefill.
        note_known(last if found.in_last == len(last.key) else last.parent)
        return held

    def evict_for_load(self, tokens: int) -> None:
        """Replaces the base's, which may evict more."""
        self.evict_shortfall(tokens)
