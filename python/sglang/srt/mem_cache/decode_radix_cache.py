"""The decode worker's radix cache: the engine's tree plus what admission needs of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import heapq
import time
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.prefix_reader import PrefixPeek, PrefixReader
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.state_kind import NO_STATE, StateKind
from sglang.srt.mem_cache.tier import NO_TIER, Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["DecodeRadixCache", "NodeWatches", "add_layer", "insert_below", "is_warmup", "path_to", "reserve"]

_layers: list[type[DecodeRadixCache]] = []


def is_warmup(req: Req) -> bool:
    """Whether ``req`` is a warm-up or health check (fake bootstrap host), for which no KV is ever transferred."""
    return req.bootstrap_host == FAKE_BOOTSTRAP_HOST


def path_to(tree: DecodeRadixCache, node: TreeNode) -> list[TreeNode]:
    """The nodes from below the root to ``node``."""
    path = []
    while node is not tree.root_node:
        path.append(node)
        node = node.parent
    return path[::-1]


def insert_below(
    tree: DecodeRadixCache, node: TreeNode, key: RadixKey, slots: torch.Tensor, priority: int = 0, chunked: bool = False
) -> tuple[int, TreeNode]:
    """Insert what follows ``node``. Returns how many tokens of that were there, and the node that it ends with.

    To the eviction policy all of the path has been used, as with `insert`, and by a request of that priority.
    slots: int64, as many as ``key`` has tokens. Cost: these and the depth of ``node``, however long the prompt is.
    """
    now = time.monotonic()
    # From the root down: so what is to be saved is saved once.
    for above in path_to(tree, node):
        above.last_access_time, above.priority = now, max(above.priority, priority)
        tree._inc_hit_count(above, chunked)
    before = tree._insert_helper(node, key, slots, priority, chunked)
    for child, _ in tree.reader.descend(node, 0, key.token_ids, key.extra_key):
        node = child
    return before, node


def reserve(pool: Any, slots: torch.Tensor) -> None:
    """Take the pages of ``slots`` (int64, of each page at least one) out of the free list of a cleared ``pool``."""
    pages = slots // pool.page_size
    pool.free_pages = pool.free_pages[~torch.isin(pool.free_pages, pages)]


def add_layer(layer: type[DecodeRadixCache]) -> None:
    """Have each decode tree be a ``layer`` too: its methods come before the core's, behind those of subclasses."""
    _layers.insert(0, layer)
    _layered.cache_clear()


@cache
def _layered(cls: Any) -> Any:
    layers = [layer for layer in _layers if not issubclass(cls, layer)]
    own = [] if cls is DecodeRadixCache and layers else [cls]
    return types.new_class(cls.__name__, (*own, *layers)) if layers else cls


def _behind_lock(tree: DecodeRadixCache, req: Req, end: int) -> tuple[RadixKey, torch.Tensor]:
    """The key and the slots, int64, of the whole pages of ``req`` from its lock to token ``end``.

    Its lock is on the node that ends at ``cache_protected_len``. Cost: what lies behind that.
    """
    start, prompt = req.cache_protected_len, req.origin_input_ids
    keys = prompt[start:end]
    if end > len(prompt):
        keys = keys + req.output_ids[max(0, start - len(prompt)) : end - len(prompt)]
    key = tree.reader.whole_pages(keys, req.extra_key)
    slots = tree.req_to_token_pool.req_to_token[req.req_pool_idx, start : start + len(key)]
    return key, slots.to(torch.int64, copy=True)


def _slots_between(above: TreeNode, node: TreeNode) -> torch.Tensor:
    """The slots, int64, of the tokens that end with ``node``, from the end of ``above`` on."""
    parts = []
    while node is not above:
        parts.append(node.value)
        node = node.parent
    return torch.cat(parts[::-1])


class NodeWatches:
    """What a tree tells of each change of its nodes, and what of them it evicts last: here none."""

    def __init__(self, tree: DecodeRadixCache, on_leave: Callable[[TreeNode], None]):
        """on_leave: told of a node that is wanted no longer, or less of it."""
        self.changes = 0

    def on_reset(self) -> None:
        """The tree is empty, with a new root."""
        self.changes += 1

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower`` from it."""
        self.changes += 1

    def on_removal(self, node: TreeNode) -> None:
        """The leaf ``node`` has been evicted."""
        self.changes += 1

    def on_new_leaf(self, node: TreeNode) -> None:
        """A leaf has been added."""
        self.changes += 1

    def wanted(self, node: TreeNode) -> int:
        """Tokens from the start of ``node``, whole pages, that are evicted last."""
        return 0

    def waiting(self, node: TreeNode) -> int:
        """For how many that is so."""
        return 0


class DecodeRadixCache(RadixCache):
    """Radix cache of a decode worker.

    Differs from the engine's in five ways: it can be asked without being changed (`peek`), it evicts an exact number
    of pages (`evict_shortfall`), it tells of changes (`watches`), it only takes KV that has been committed, and it
    keeps a ledger of its locks.
    """

    # What reads it, and makes its keys, and what it tells of changes; an extra may put another in their place.
    reader_type = PrefixReader
    watches_type = NodeWatches
    # What its requests have beside KV.
    state: StateKind = NO_STATE
    # Where its KV is kept beside its pool.
    tier: Tier = NO_TIER
    # Steps over prompts, by number: which is to write what enters the tree now (0: it is there), and which are over.
    writing = written = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> DecodeRadixCache:
        """See `add_layer`."""
        return super().__new__(_layered(cls))  # type: ignore[arg-type]

    @classmethod
    def take_over(cls, cache: RadixCache, **more: Any) -> DecodeRadixCache:
        """The decode cache for the pools of ``cache``, which must still be empty.

        The metrics collector moves along, since a second one would register the same metrics twice.
        more: of the engine's parameters.
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
        """The allocator of the slots that the tree holds."""
        return self.token_to_kv_pool_allocator

    @property
    def pool_size(self) -> int:
        """Tokens."""
        return self.pool.size

    def shareable(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """The part of a prompt that its request may share with others, and the tree may hold while it runs."""
        return token_ids

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "watches"):
            self.watches.on_reset()
        else:
            self.reader = self.reader_type(self)
            self.watches = self.watches_type(self, self.no_longer_wanted)
        self.generation = getattr(self, "generation", 0) + 1
        self.growth = getattr(self, "growth", 0) + 1
        self.locks_taken = 0
        self.locks_released = 0

    def accepts(self, req: Req) -> bool:
        """Whether the tree may serve ``req`` and take its KV.

        Not for warm-ups, and not for a request whose KV is older than the last flush: one that was retracted before a
        weight update comes back with KV of the old weights, which must neither mix with the new nor stay in the tree.
        """
        return not is_warmup(req) and req.kv_generation in (None, self.generation)

    # ---- asking ----

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """What the tree holds of ``token_ids``, see `PrefixReader.peek`."""
        return self.reader.peek(token_ids, extra_key)

    def lock_prefix(self, found: PrefixPeek) -> tuple[list[torch.Tensor], TreeNode]:
        """Lock what `peek` found; the tree must not have changed in between.

        It does to the tree what a match and `inc_lock_ref` do (access times, a split where the match ends inside a
        node, sizes) without comparing the tokens or counting them once more. The lock is always taken, at the root
        when nothing matched, so that every release has its lock.

        Returns the KV indices, int64 of ``found.length`` slots in parts, and the locked node.
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
        # No other node of the path can have been a leaf.
        self._update_leaf_status(last)
        return parts, last

    # ---- locks ----

    def inc_lock_ref(self, node: TreeNode):
        self.locks_taken += 1
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params=None):
        self.locks_released += 1
        return super().dec_lock_ref(node, params)

    # ---- taking in and giving back ----

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """Replaces the engine's, which walks the whole prompt three times; what has been committed is no second use.

        ``fill_ids`` already has the token whose KV the next decode step computes; a slot of it must not enter the tree.
        chunked: to policies by use this is none, nor is what comes back from a retraction, or was computed here.
        """
        end = min(len(req.fill_ids), self._committed_end(req)) - self.reader.unknown
        if req.cache_protected_len + self.page_size <= end:
            self.commit_req(req, len(req.fill_ids), chunked or req.retracted_stain or req.computed_here > 0)

    def commit_req(self, req: Req, end: int | None = None, chunked: bool = False) -> None:
        """Put the committed KV of ``req`` behind its lock, before token ``end`` if given, into the tree and lock it.

        Called when all of it has arrived, so that others find it at once; the prebuilt batch has nothing to insert.
        """
        if not self.accepts(req):
            return
        start, committed = req.cache_protected_len, self._committed_end(req)
        key, slots = _behind_lock(self, req, committed if end is None else min(end, committed))
        held, node = insert_below(self, req.last_node, key, slots, req.priority or 0, chunked)
        if held:
            # The request goes on with what others have brought meanwhile.
            theirs = _slots_between(req.last_node, node)[:held]
            self.req_to_token_pool.write((req.req_pool_idx, slice(start, start + held)), theirs)
            self.token_to_kv_pool_allocator.free(slots[:held])
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        req.last_node, req.cache_protected_len = node, start + len(key)

    def _committed_end(self, req: Req) -> int:
        """Tokens of ``req``, which goes on, that the tree may hold."""
        return req.kv_committed_len

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Replaces the engine's, which walks the whole prompt: inserts what is behind the lock, and frees the rest."""
        end, start = req.pop_committed_kv_cache(), req.cache_protected_len
        table = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        free = [table[start:end]]
        if is_insert and self.accepts(req) and not self.disable_finished_insert:
            # To a policy by use it is one, also where there is nothing to insert.
            key, slots = _behind_lock(self, req, end)
            held, _ = insert_below(self, req.last_node, key, slots, req.priority or 0)
            free = [slots[:held], table[start + len(key) : end]]
        for slots in free:
            self.token_to_kv_pool_allocator.free(slots)
        self.dec_lock_ref(req.last_node)

    def alloc_delta(self, num_tokens: int) -> torch.Tensor | None:
        """Slots for what a remote worker will write, int64: whole pages; None if there are too few."""
        return self.pool.alloc(num_tokens)

    def evict_shortfall(self, num_tokens: int) -> int:
        """Evict ``num_tokens`` rounded up to pages, and no more: the last victim is split and keeps its head.

        The engine's ``evict`` takes whole leaves, which for one request can empty a cache of long prompts. Like that,
        this looks at all leaves. Returns the number of tokens freed; fewer than asked when the rest is locked.
        """
        start, freed = time.perf_counter(), 0
        # The id decides between equals, so that all TP ranks do alike.
        heap = [(self.eviction_strategy.get_priority(leaf), leaf.id, leaf) for leaf in self.evictable_leaves]
        heapq.heapify(heap)
        while heap and freed < num_tokens:
            leaf = heapq.heappop(heap)[-1]
            freed += self.evict_leaf(leaf, len(leaf.key) - (num_tokens - freed))
            if (parent := leaf.parent) in self.evictable_leaves:
                heapq.heappush(heap, (self.eviction_strategy.get_priority(parent), parent.id, parent))
        self.update_eviction_metrics(freed, start)
        return freed

    def evict_leaf(self, leaf: TreeNode, keep: int) -> int:
        """Evict a leaf but for the whole pages of its first ``keep`` tokens. Returns the tokens that were freed."""
        keep = keep // self.page_size * self.page_size
        if keep > 0:
            head = self._split_node(leaf.key, leaf, keep)
            head.last_access_time, head.creation_time = leaf.last_access_time, leaf.creation_time
        self._delete_leaf(leaf)
        self.pool.free(leaf.value)
        self._record_remove_event(leaf)
        return len(leaf.value)

    def no_longer_wanted(self, node: TreeNode) -> None:
        """See `NodeWatches`."""

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Tells of the split."""
        upper = super()._split_node(key, child, split_len)
        self.watches.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Tells of the removal."""
        super()._delete_leaf(node)
        self.watches.on_removal(node)

    def _record_store_event(self, node: TreeNode) -> None:
        """Tells of a new leaf."""
        self.growth += 1
        before = len(self.kv_event_queue)
        super()._record_store_event(node)
        self.reader.tell_tokens(self.kv_event_queue[before:])
        self.watches.on_new_leaf(node)

    def audit(self, holders: Iterable[TreeNode]) -> list[str]:
        """How the tree contradicts itself, or that live requests have a lock on each of ``holders``. Of extras."""
        return []
