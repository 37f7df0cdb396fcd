"""The decode worker's radix cache: the engine's tree plus what admission needs of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import heapq
import time
import types
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.prefix_reader import PrefixPeek, PrefixReader
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.state_kind import NO_STATE, STATE_KINDS, StateKind
from sglang.srt.mem_cache.tier import NO_TIER, Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


_layers: list[type[DecodeRadixCache]] = []


def is_warmup(req: Req) -> bool:
    """Whether ``req`` is a warm-up or health check (fake bootstrap host), which transfers no KV."""
    return req.bootstrap_host == FAKE_BOOTSTRAP_HOST


def path_to(tree: DecodeRadixCache, node: TreeNode) -> list[TreeNode]:
    """The nodes from the root (excluded) down to ``node``."""
    path = []
    while node is not tree.root_node:
        path.append(node)
        node = node.parent
    return path[::-1]


def insert_below(
    tree: DecodeRadixCache,
    node: TreeNode,
    key: RadixKey,
    slots: torch.Tensor,
    priority: int = 0,
    chunked: bool = False,
) -> tuple[int, TreeNode]:
    """Insert ``key`` below ``node``. Returns how many of its tokens existed, and its last node.

    For the eviction policy the whole path counts as used at ``priority``, as with `insert`.
    slots: int64, one per token of ``key``. Cost: len(key) plus the depth of ``node``.
    """
    now = time.monotonic()
    # From the root down, so a write-through tier saves each node once.
    for above in path_to(tree, node):
        above.last_access_time, above.priority = now, max(above.priority, priority)
        tree._inc_hit_count(above, chunked)
    before = tree._insert_helper(node, key, slots, priority, chunked)
    for child, _ in tree.reader.descend(node, 0, key.token_ids, key.extra_key):
        node = child
    return before, node


def add_layer(layer: type[DecodeRadixCache]) -> None:
    """Make ``layer`` a base of each decode tree: after its own class, before `DecodeRadixCache`."""
    _layers.insert(0, layer)
    _layered.cache_clear()


@cache
def _layered(cls: Any) -> Any:
    layers = [layer for layer in _layers if not issubclass(cls, layer)]
    own = [] if cls is DecodeRadixCache and layers else [cls]
    return types.new_class(cls.__name__, (*own, *layers)) if layers else cls


def _after_lock(tree: DecodeRadixCache, req: Req, end: int) -> tuple[RadixKey, torch.Tensor]:
    """Key and slots (int64) of the whole pages of ``req`` from its lock to token ``end``."""
    start, prompt = req.cache_protected_len, req.origin_input_ids
    keys = prompt[start:end]
    if end > len(prompt):
        keys = keys + req.output_ids[max(0, start - len(prompt)) : end - len(prompt)]
    key = tree.reader.whole_pages(keys, req.extra_key)
    slots = tree.req_to_token_pool.req_to_token[req.req_pool_idx, start : start + len(key)]
    return key, slots.to(torch.int64, copy=True)


def _slots_between(above: TreeNode, node: TreeNode) -> torch.Tensor:
    """Slots (int64) of the nodes below ``above`` down to ``node``."""
    parts = []
    while node is not above:
        parts.append(node.value)
        node = node.parent
    return torch.cat(parts[::-1])


class DecodeRadixCache(RadixCache):
    """Radix cache of a decode worker.

    Unlike the engine's it matches without side effects (`peek`), evicts an exact number of pages
    (`evict_shortfall`), inserts only committed KV, and counts locks.
    """

    # An extra may replace it.
    reader_type = PrefixReader
    # What requests have besides KV.
    state: StateKind = NO_STATE
    # Where KV is kept outside the pool.
    tier: Tier = NO_TIER
    # Numbers of local prefill steps: the step that will write the KV being inserted (0: it is
    # written), and the last step that has ended.
    writing = written = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> DecodeRadixCache:
        """Adds the classes given to `add_layer`."""
        return super().__new__(_layered(cls))  # type: ignore[arg-type]

    @classmethod
    def take_over(cls, cache: RadixCache, **more: Any) -> DecodeRadixCache:
        """Build the decode cache for the pools of ``cache``, which must still be empty.

        It reuses the metrics collector: a second one would register the same metrics twice.
        """
        new = cls(
            CacheInitParams(
                disable=cache.disable,
                req_to_token_pool=cache.req_to_token_pool,
                token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
                page_size=cache.page_size,
                is_eagle=cache.is_eagle,
                eviction_policy=cache.eviction_policy,
                disable_finished_insert=cache.disable_finished_insert,
                enable_kv_cache_events=cache.enable_kv_cache_events,
                **more,
            )
        )
        if isinstance(cache, DecodeRadixCache):
            new.state = cache.state
        if hasattr(cache, "metrics_collector"):
            new.metrics_collector = cache.metrics_collector
        return new

    @property
    def pool(self) -> Any:
        """The allocator of the tree's slots."""
        return self.token_to_kv_pool_allocator

    @property
    def pool_size(self) -> int:
        """Size of the pool in tokens."""
        return self.pool.size

    def shareable(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """The part of a prompt that the tree may hold while its request runs."""
        return token_ids

    def reset(self) -> None:
        super().reset()
        self.reader = self.reader_type(self)
        self.generation = getattr(self, "generation", 0) + 1
        self.growth = getattr(self, "growth", 0) + 1
        self.locks_taken = 0
        self.locks_released = 0

    def empty(self, reqs: Iterable[Req]) -> None:
        """Empty the tree of a worker whose only requests are ``reqs``, which keep their deltas."""
        nodes = [*self.root_node.children.values()]
        for node in nodes:
            nodes += node.children.values()
        if nodes:
            self.pool.free(torch.cat([node.value for node in nodes]))
        self.reset()
        for req in reqs:
            req.last_node = self.root_node
            self.inc_lock_ref(req.last_node)

    def accepts(self, req: Req) -> bool:
        """Whether the tree may serve ``req`` and take its KV.

        False for warm-ups and for KV older than the last flush: a request retracted before a weight
        update resumes with KV of the old weights.
        """
        return not is_warmup(req) and req.kv_generation in (None, self.generation)

    # ---- matching ----

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """See `PrefixReader.peek`."""
        return self.reader.peek(token_ids, extra_key)

    def lock_prefix(self, found: PrefixPeek) -> tuple[list[torch.Tensor], TreeNode]:
        """Lock what `peek` found; the tree must not have changed in between.

        Has the effect of a match and `inc_lock_ref` (access times, a split, sizes) without
        comparing tokens again. If nothing matched it locks the root, so every release has its lock.

        Returns the KV slots (int64, ``found.length`` in parts) and the locked node.
        """
        now = time.monotonic()
        self.root_node.last_access_time = now
        if not found.path:
            self.locks_taken += 1
            return [], self.root_node
        parts: list[torch.Tensor] = []
        *above, last = found.path
        last.last_access_time = now
        if found.in_last < len(last.key.token_ids):
            last = self._split_node(last.key, last, found.in_last)
        self.locks_taken += 1
        for node in above:
            node.last_access_time = now
            node.lock_ref += 1
            parts.append(node.value)
        last.lock_ref += 1
        parts.append(last.value)
        self.evictable_size_ -= found.evictable
        self.protected_size_ += found.evictable
        # No other node of the path was a leaf.
        self._update_leaf_status(last)
        return parts, last

    # ---- locks ----

    def inc_lock_ref(self, node: TreeNode):
        self.locks_taken += 1
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params=None):
        self.locks_released += 1
        return super().dec_lock_ref(node, params)

    # ---- inserting and evicting ----

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """Replaces the engine's, which walks the whole prompt three times and counts a second hit.

        The tree must not take the last token of ``fill_ids``: the next decode step computes its KV.
        chunked: count no hit; none is counted after a retraction or local prefill either.
        """
        end = min(len(req.fill_ids), self._committed_end(req)) - self.reader.unknown
        if req.cache_protected_len + self.page_size <= end:
            self.commit_req(
                req, len(req.fill_ids), chunked or req.retracted_stain or req.computed_here > 0
            )

    def commit_req(self, req: Req, end: int | None = None, chunked: bool = False) -> None:
        """Insert and lock the committed KV of ``req`` from its lock to token ``end`` (default:
        all).

        Called when the KV has arrived, so others match it at once, before the prebuilt batch.
        """
        if not self.accepts(req):
            return
        start, committed = req.cache_protected_len, self._committed_end(req)
        key, slots = _after_lock(self, req, committed if end is None else min(end, committed))
        held, node = insert_below(self, req.last_node, key, slots, req.priority or 0, chunked)
        if held:
            # Others inserted these tokens meanwhile: the request uses their slots.
            shared = _slots_between(req.last_node, node)[:held]
            self.req_to_token_pool.write((req.req_pool_idx, slice(start, start + held)), shared)
            self.token_to_kv_pool_allocator.free(slots[:held])
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        req.last_node, req.cache_protected_len = node, start + len(key)

    def _committed_end(self, req: Req) -> int:
        """Tokens of the unfinished ``req`` that the tree may hold."""
        return req.kv_committed_len

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Replaces the engine's, which walks the whole prompt again."""
        end, start = req.pop_committed_kv_cache(), req.cache_protected_len
        table = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        free = [table[start:end]]
        if is_insert and self.accepts(req) and not self.disable_finished_insert:
            # Also with an empty key: it counts as a hit.
            key, slots = _after_lock(self, req, end)
            held, _ = insert_below(self, req.last_node, key, slots, req.priority or 0)
            free = [slots[:held], table[start + len(key) : end]]
        for slots in free:
            self.token_to_kv_pool_allocator.free(slots)
        self.dec_lock_ref(req.last_node)

    def alloc_delta(self, num_tokens: int) -> torch.Tensor | None:
        """Slots (int64, whole pages) that prefill will write to; None if there are too few."""
        return self.pool.alloc(num_tokens)

    def evict_shortfall(self, num_tokens: int) -> int:
        """Evict ``num_tokens`` rounded up to pages and no more: the last victim keeps its head.

        The engine's ``evict`` takes whole leaves, which with long prompts can empty the cache. Like
        it, this looks at all leaves. Returns the tokens freed: fewer if the rest is locked.
        """
        start, freed = time.perf_counter(), 0
        # The id breaks ties, so that all TP ranks evict the same nodes.
        heap = [
            (self.eviction_strategy.get_priority(leaf), leaf.id, leaf)
            for leaf in self.evictable_leaves
        ]
        heapq.heapify(heap)
        while heap and freed < num_tokens:
            leaf = heapq.heappop(heap)[-1]
            freed += self.evict_leaf(leaf, len(leaf.key) - (num_tokens - freed))
            if (parent := leaf.parent) in self.evictable_leaves:
                heapq.heappush(
                    heap, (self.eviction_strategy.get_priority(parent), parent.id, parent)
                )
        self.update_eviction_metrics(freed, start)
        return freed

    def evict_leaf(self, leaf: TreeNode, keep: int) -> int:
        """Evict ``leaf`` except whole pages of its first ``keep`` tokens. Returns freed tokens."""
        keep = keep // self.page_size * self.page_size
        if keep > 0:
            head = self._split_node(leaf.key, leaf, keep)
            head.last_access_time, head.creation_time = leaf.last_access_time, leaf.creation_time
        self._delete_leaf(leaf)
        self.pool.free(leaf.value)
        self._record_remove_event(leaf)
        return len(leaf.value)

    def _record_store_event(self, node: TreeNode) -> None:
        """Counts new leaves, and publishes their tokens."""
        self.growth += 1
        before = len(self.kv_event_queue)
        super()._record_store_event(node)
        self.reader.tell_tokens(self.kv_event_queue[before:])

    def audit(self, holders: Iterable[TreeNode]) -> list[str]:
        """Faults of the tree, given the nodes that live requests lock. An extra implements it."""
        return []


def build_tree(kind: type[StateKind], engines: Any, scheduler: Any) -> DecodeRadixCache:
    """Build the decode tree for the pools of ``engines``, the engine's tree.

    Prefill sends what a request has besides KV with every request, so the tree keeps KV only.
    Raises ValueError for a model that is not verified.
    """
    if type(engines) is not RadixCache:
        others = " or ".join(other.layers for other in STATE_KINDS if other.word)
        others = f", or in some layers {others}, are" if others else " are without the extra hybrid"
        raise ValueError(
            f"{FLAG} is not verified for this model: the engine chose {type(engines).__name__} "
            f"for it, and only models with full attention throughout (RadixCache){others}. "
            "Start this decode worker without the flag."
        )
    cache_support.check_tree(FLAG, engines)
    check_pool(kind, scheduler.tp_worker.model_runner)
    if (own := kind.take_over(engines, scheduler)) is not None:
        return own
    tree = DecodeRadixCache.take_over(engines)
    tree.state = kind.beside(tree)
    return tree


def check_pool(kind: type[StateKind], runner: Any) -> None:
    """Raise ValueError if the KV pool keeps state and no extra has its kind."""
    if kind is StateKind and hasattr(runner.token_to_kv_pool, "get_state_buf_infos"):
        raise ValueError(
            f"{FLAG} is not verified for this model: beside KV it keeps what the engine calls "
            f"state ({type(runner.token_to_kv_pool).__name__}). "
            "Start this decode worker without the flag."
        )
