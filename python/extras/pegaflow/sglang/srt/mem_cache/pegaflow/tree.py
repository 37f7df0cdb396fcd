"""Radix caches whose pages are also kept in a PegaFlow server, which other engine processes on the machine share.

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
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, reserve
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

# Saves that one step decides on, the oldest first. It is part of the width of what TP ranks reduce.
SAVES_AGREED = 64
# A flush waits for what is under way: this often, this long each time.
DRAIN_ROUNDS, DRAIN_PAUSE_S = 500, 0.01


class PegaFlowTree(SavingTree, Tier):
    """What both caches add to their tree, of which the server is the tier.

    All of it runs in the scheduler thread, and none of it waits. Each node knows the names of its pages. A new node is
    saved in the next step, or when the step that is to write it is over. When a request arrives, the server is asked
    for its prompt. What it has beyond the tree is loaded into pages that belong to nobody else, which enter the tree
    when all have come. What the tree has and the server lacks is saved, once more if need be.

    All that TP ranks could see differently (answers, what has been saved or loaded) takes effect in `advance`, after
    one reduction over the ranks, so that their trees stay the same.
    """

    name = "a PegaFlow server"
    session: PegaFlowSession
    prefetches: Prefetches
    saves: Saves | None = None
    # The requests that hold KV; set by who knows them.
    live: Callable[[], Live] = staticmethod(lambda: NOBODY)
    tp_group: Any = None
    # Steps so far.
    step = 0
    # Steps over prompts, see `DecodeRadixCache`. Elsewhere all that enters the tree is there.
    writing = written = 0
    # Whether what enters the tree now comes from the server.
    inserts_loaded = False

    def attach(self, session: PegaFlowSession, tp_group: Any = None, saves: bool = True) -> None:
        """Begin to use ``session``; the tree must be empty.

        tp_group: the CPU group of the TP ranks, None for one rank. saves: False where another rank saves for this one.
        """
        self.session, self.tp_group = session, tp_group
        self.saves = Saves(self, session, saves)
        self.prefetches = Prefetches(self, session, self.saves.learn)
        # Saves and loads that were under way when the tree was reset: nobody waits for them, and their pages stay out
        # of the pool until the server is done with them.
        self.fenced: list[Save | Load] = []
        self.step = 0

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return self

    @property
    def busy(self) -> bool:
        """Whether pages are being saved or loaded, or soon will be, or the server has been asked."""
        return self.saves is not None and (self.saves.busy or bool(self.prefetches.open))

    def stop(self) -> None:
        """As soon as nothing is under way: nothing new begins."""
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
        """Tokens outside the tree that the server may write to, or has not read when the tree was reset."""
        return 0 if self.saves is None else self.prefetches.loading_tokens + self.fenced_tokens

    @property
    def fenced_tokens(self) -> int:
        return sum(len(one.slots) for one in self.fenced)

    def protected_size(self) -> int:
        """Adds the pages that nobody can be given."""
        return super().protected_size() + self.unreturned_tokens

    def nodes_in_use(self) -> list[TreeNode]:
        return [] if self.saves is None else self.saves.locked() + self.prefetches.locked_nodes()

    def pegaflow_state(self) -> dict[str, Any]:
        """What the server has been asked and given, in pages, and what is under way, in tokens."""
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
        """Insert what was loaded, which need not be saved; returns the tokens that the tree held before."""
        self.inserts_loaded = True
        try:
            return self.insert(InsertParams(key=key, value=value, priority=priority)).prefix_len
        finally:
            self.inserts_loaded = False

    def evict_for_load(self, tokens: int) -> None:
        """Make room for a load."""
        self.evict(EvictParams(num_tokens=tokens))

    # ---- what admission on decode asks ----

    def know_live(self, live: Callable[[], LiveReqs], growth: Callable[[LiveReqs], int]) -> None:
        self.live = lambda: live_on_decode(live(), growth)

    def fetch(self, req: Req, entry: QueueEntry) -> None:
        self.prefetch(req.rid, req.origin_input_ids, req.extra_key, req.priority or 0)

    def is_done(self, rid: str) -> bool:
        return self.prefetches.is_done(rid)

    def leave(self, rid: str) -> None:
        """What is being loaded for it enters the tree all the same."""
        self.prefetches.leave(rid)

    # ---- what the engine asks of a tree whose prefixes come from elsewhere ----

    def prefetch(self, rid: str, token_ids: Sequence[int], extra_key: str | None, priority: int = 0) -> None:
        """Ask the server for ``token_ids``, whole pages. The request ``rid`` waits for what the tree lacks of them."""
        if self.saves is not None and not self.disable and not self.session.stopped:
            self.prefetches.ask(rid, token_ids, extra_key, priority)

    check_prefetch_progress = is_done

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Tokens that were loaded for ``rid``, which is now being matched."""
        return self.prefetches.ready.pop(rid, 0)

    release_aborted_request = leave

    # ---- a step ----

    def advance(self) -> bool:
        """Take note of what has been saved, found and loaded. Called once per step, on all ranks.

        Returns whether requests may now be given more than before.
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
        """Let go of what is under way, for a reset that does not wait for it, but for the pages."""
        assert self.saves is not None
        self.fenced += [*self.prefetches.let_go(), *self.saves.let_go()]

    def keep_fenced(self) -> None:
        """Take what the server may still read or write out of an allocator that has been cleared, until it is done."""
        if self.fenced:
            reserve(self.token_to_kv_pool_allocator, torch.cat([one.slots for one in self.fenced]))


class PegaFlowRadixCache(PegaFlowTree):
    """The cache of an aggregated server, and of a prefill worker."""

    take_over: Any = classmethod(DecodeRadixCache.take_over.__func__)  # type: ignore[attr-defined]

    def _record_store_event(self, node: TreeNode) -> None:
        """Events tell prompts with an extra_key apart."""
        record_store(self, node, super()._record_store_event)


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
