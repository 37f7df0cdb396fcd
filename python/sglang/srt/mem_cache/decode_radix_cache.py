"""The decode worker's radix cache: the engine's tree plus what admission needs of it.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, InsertResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.prefix_watch import PrefixWatches, Watch
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.window_radix_cache import WindowSlots

__all__ = ["NOTHING", "DecodeRadixCache", "PrefixPeek", "climb", "is_warmup", "watermark_part"]


class PrefixPeek(NamedTuple):
    """What the tree holds of a prompt, found without touching the tree. Good until the tree next changes.

    length: matched tokens, a multiple of the page size.
    evictable: how many of them no request has locked; locking the match takes these out of the evictable size.
    path: the nodes that hold them, from the root down.
    in_last: tokens of the last node that matched, a multiple of the page size.
    """

    length: int
    evictable: int
    path: list[TreeNode]
    in_last: int


NOTHING = PrefixPeek(0, 0, [], 0)

WATERMARK = "SGLANG_DISAGGREGATION_DECODE_FREE_WATERMARK"
DEFAULT_WATERMARK = 1 / 16
# Leaves that one step evicts to reach it: it must not be felt.
WATERMARK_LEAVES = 16
# The part of it that may be missing before anything is evicted.
WATERMARK_SLACK = 1 / 8


def watermark_part() -> float:
    """The part of the pool to keep free, from the environment, or the default. Raises ValueError."""
    text = os.environ.get(WATERMARK, "").strip()
    if not text:
        return DEFAULT_WATERMARK
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 0.5:
        raise ValueError(f"{WATERMARK} is {text!r}: give the part of the KV pool to keep free, from 0 (none) to 0.5.")
    return part


def is_warmup(req: Req) -> bool:
    """Whether ``req`` is a warm-up or health check (fake bootstrap host), for which no KV is ever transferred."""
    return req.bootstrap_host == FAKE_BOOTSTRAP_HOST


def climb(node: TreeNode, seen: set[TreeNode]) -> int:
    """Tokens of ``node`` and what is above it, but for what has been seen, which this adds to."""
    tokens = 0
    while node.parent is not None and node not in seen:
        seen.add(node)
        tokens += len(node.key)
        node = node.parent
    return tokens


class DecodeRadixCache(RadixCache):
    """Radix cache of a decode worker.

    Differs from the engine's in five ways: it can be asked without being changed (`peek`), it evicts an exact number
    of pages (`evict_shortfall`), it knows what queued requests match (`watches`) and evicts that last, it only takes KV
    that has been committed, and it keeps a ledger of its locks.
    """

    # The other pool of a model with sliding windows.
    windows: WindowSlots | None = None

    @classmethod
    def take_over(cls, cache: RadixCache, sliding_window_size: int | None = None) -> DecodeRadixCache:
        """The decode cache for the pools of ``cache``, which must still be empty.

        The metrics collector moves along, since a second one would register the same metrics twice.
        sliding_window_size: of a model with a pool for it.
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
                sliding_window_size=sliding_window_size,
            )
        )
        if hasattr(cache, "metrics_collector"):
            new.metrics_collector = cache.metrics_collector
        return new

    def __init__(self, params: CacheInitParams):
        """Adds the order of the free list: see ``mem_cache/allocator.py``."""
        super().__init__(params)
        self.pool.long_runs_last = True
        # Tokens to keep free, whole pages.
        self.watermark = int(watermark_part() * self.pool_size) // self.page_size * self.page_size

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
            self.watches = PrefixWatches(self, lambda node: self.victims.no_longer_wanted(node))
        self.victims = EvictionOrder(self.evictable_leaves, self.eviction_strategy, self.watches.waiting)
        self.generation = getattr(self, "generation", 0) + 1
        self.growth = getattr(self, "growth", 0) + 1
        self.locks_taken = 0
        self.locks_released = 0

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert, and advance ``growth`` when the tree holds more than before.

        A request that found too little room need not look at the tree again until ``growth`` has moved.
        """
        result = super().insert(params)
        if result.prefix_len < len(params.key):
            self.growth += 1
        return result

    def takes(self, req: Req) -> bool:
        """Whether the tree may serve ``req`` and take its KV.

        Not for warm-ups, and not for a request whose KV is older than the last flush: one that was retracted before a
        weight update comes back with KV of the old weights, which must neither mix with the new nor stay in the tree.
        """
        return not is_warmup(req) and req.kv_generation in (None, self.generation)

    # ---- asking ----

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """What the tree knows these tokens by: with EAGLE each is a pair with the one after it, else they themselves.

        A draft's KV of a token depends on the next one too. So of a prompt all tokens but the last can be matched.
        """
        if not self.is_eagle or (token_ids and isinstance(token_ids[0], tuple)):
            return token_ids
        return list(zip(token_ids, token_ids[1:], strict=False))

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """Longest page-aligned prefix of ``token_ids`` in the tree, without a split, an access time or a lock.

        token_ids: list of ints, as long as the request may match, or their `keys_of`. Cost: one comparison per token,
        at C speed.
        """
        token_ids = self.keys_of(token_ids)
        path: list[TreeNode] = []
        length = evictable = span = 0
        for node, span in self.descend(self.root_node, 0, token_ids, extra_key):
            path.append(node)
            length += span
            if node.lock_ref == 0:
                evictable += span
        return PrefixPeek(length, evictable, path, span)

    def descend(
        self, node: TreeNode, length: int, token_ids: Sequence[Any], extra_key: str | None
    ) -> Iterator[tuple[TreeNode, int]]:
        """The nodes below ``node`` that hold what follows the first ``length`` tokens, each with how many it holds.

        token_ids: as `keys_of` returns them.

        ``node`` ends where these tokens end. Nothing is touched; cost: one comparison per token, at C speed.
        """
        page, child_key = self.page_size, self.get_child_key_fn
        end = len(token_ids) // page * page
        following = RadixKey([], extra_key)
        while length < end:
            following.token_ids = token_ids[length : length + page]
            child = node.children.get(child_key(following))
            if child is None:
                return
            held = child.key.token_ids
            stop = length + len(held)
            wanted = token_ids[length : stop if stop < end else end]
            if held != wanted:
                # It ends within the node.
                yield child, self.common_length(held, wanted)
                return
            yield child, stop - length
            length, node = stop, child

    def common_length(self, a: Sequence[Any], b: Sequence[Any], known: int = 0) -> int:
        """Tokens, whole pages, that ``a`` and ``b`` share from their start; the first ``known`` are known to be equal.

        A prefix is equal up to some page and never after, so the end is found by halving.
        """
        page, low, high = self.page_size, known // self.page_size, min(len(a), len(b)) // self.page_size
        while low < high:
            mid = (low + high + 1) // 2
            if a[low * page : mid * page] == b[low * page : mid * page]:
                low = mid
            else:
                high = mid - 1
        return low * page

    def found(self, watch: Watch) -> PrefixPeek:
        """What `peek` would find of a watched prompt. Cost: the depth of its node."""
        path: list[TreeNode] = []
        evictable, node, span = 0, watch.node, watch.in_last
        while node is not self.root_node:
            path.append(node)
            if node.lock_ref == 0:
                evictable += span
            node = node.parent
            span = len(node.key.token_ids)
        path.reverse()
        return PrefixPeek(watch.length, evictable, path, watch.in_last)

    def unlocked(self, watch: Watch) -> int:
        """Tokens of a watched prompt that the tree holds and nobody has locked. Cost: as many nodes as that are."""
        node, span, tokens = watch.node, watch.in_last, 0
        while node.lock_ref == 0:
            tokens += span
            node = node.parent
            span = len(node.key.token_ids)
        return tokens

    def lock_found(self, found: PrefixPeek) -> tuple[list[torch.Tensor], TreeNode]:
        """Lock what `peek` found; the tree must not have changed in between.

        It does to the tree what a match and `inc_lock_ref` do (access times, a split where the match ends inside a
        node, sizes) without comparing the tokens or counting them once more. The lock is always taken, at the root
        when nothing matched, so that every release has its lock.

        Returns the KV indices, int64 of ``found.length`` slots in parts, and the locked node.
        """
        now = time.monotonic()
        self.locks_taken += 1
        self.root_node.last_access_time = now
        if not found.path:
            return [], self.root_node
        parts: list[torch.Tensor] = []
        *above, last = found.path
        last.last_access_time = now
        if found.in_last < len(last.key.token_ids):
            last = self._split_node(last.key, last, found.in_last)
        # From here on nothing raises.
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

    def held_by(self, nodes: Iterable[TreeNode | None]) -> int:
        """Tokens of the tree that locks on ``nodes`` hold, each once. Cost: the nodes above these, each once."""
        seen: set[TreeNode] = set()
        return sum([climb(node, seen) for node in nodes if node is not None])

    def inc_lock_ref(self, node: TreeNode):
        self.locks_taken += 1
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params=None):
        self.locks_released += 1
        return super().dec_lock_ref(node, params)

    # ---- taking in and giving back ----

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """Put the committed KV of ``req`` into the tree and move its lock to the end of it.

        ``fill_ids`` already has the token whose KV the next decode step computes; a slot of it must not enter the tree.
        """
        if not self.takes(req):
            return
        if req.committed_indices is not None:
            req.prefix_indices, req.committed_indices = req.committed_indices, None
            return
        fill_ids = req.fill_ids
        req.fill_ids = fill_ids[: self._committed_end(req)]
        try:
            super().cache_unfinished_req(req, chunked)
        finally:
            req.fill_ids = fill_ids

    def _committed_end(self, req: Req) -> int:
        """Tokens of ``req``, which goes on, that the tree may hold."""
        return req.kv_committed_len

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        super().cache_finished_req(req, is_insert=is_insert and self.takes(req))

    def commit_req(self, req: Req) -> None:
        """Put the KV of ``req``, all of which has just arrived, into the tree, without waiting for its prebuilt batch.

        Requests that follow it, and copies of the same pages that others bring, find it at once. To the engine the
        request still begins at position 0; see `cache_unfinished_req`.
        """
        if not self.takes(req):
            return
        # What the engine wants to find in it after its own call, when the batch is made.
        nothing = req.prefix_indices
        self.cache_unfinished_req(req)
        req.committed_indices, req.prefix_indices = req.prefix_indices, nothing

    def evict_shortfall(self, num_tokens: int) -> int:
        """Evict ``num_tokens`` rounded up to pages, and no more: the last victim is split and keeps its head.

        The engine's ``evict`` takes whole leaves, which for one request can empty a cache of long prompts.
        Returns the number of tokens freed; fewer than asked when the rest is locked.
        """
        return self._evict(num_tokens, exact=True)

    def evict(self, params: EvictParams) -> EvictResult:
        """Replaces the engine's evict, which sorts all leaves on every call: the same victims in the same order."""
        return EvictResult(num_tokens_evicted=self._evict(params.num_tokens, exact=False))

    def evict_to_watermark(self) -> None:
        """Evict what the free list lacks to the watermark, a few leaves at a time; nothing that a request waits for.

        A pool without one hands each request the pages of whatever leaves just went for it, and each decode step cuts
        the next long run up: with it there are long runs and short ones to choose from. Requests may use all of what is
        kept free; it is not part of what they are budgeted.
        """
        short = self.watermark - self.pool.available_size()
        # Not a page at a time: that is what each decode step takes, and each eviction has its costs.
        if short > self.watermark * WATERMARK_SLACK:
            self._evict(short, exact=True, max_leaves=WATERMARK_LEAVES, wanted_too=False)

    def _evict(self, num_tokens: int, exact: bool, max_leaves: int | None = None, wanted_too: bool = True) -> int:
        """Evict leaves in the order of the eviction policy; what queued requests match goes last, if at all.

        Of a leaf that they match in part, the rest goes first. Among what they match, that for which fewest wait.
        """
        start = time.perf_counter()
        if self.eviction_policy == "mru":
            # The only policy by which a node in the list can move towards the front.
            self.victims.list_anew()
        allocator = self.pool
        batching = allocator.is_not_in_free_group
        if batching:
            allocator.free_group_begin()
        freed = leaves = 0
        while freed < num_tokens and leaves != max_leaves:
            node = self.victims.take_next()
            if node is not None:
                keep = self.watches.wanted(node)
                if keep == len(node.key):
                    self.victims.spare(node)
                    continue
            else:
                node = self.victims.take_least_wanted() if wanted_too else None
                if node is None:
                    break
                keep = 0
            leaves += 1
            if exact:
                keep = max(keep, (len(node.key) - (num_tokens - freed)) // self.page_size * self.page_size)
            if keep > 0:
                head = self._split_node(node.key, node, keep)
                head.last_access_time, head.creation_time = node.last_access_time, node.creation_time
            allocator.free(node.value)
            freed += len(node.value)
            self._delete_leaf(node)
            self._record_remove_event(node)
        if batching:
            allocator.free_group_end()
        self.update_eviction_metrics(freed, start)
        return freed

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Adds that what waits for ``child`` learns of it."""
        upper = super()._split_node(key, child, split_len)
        self.watches.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Adds that what waits for ``node`` learns of it."""
        super()._delete_leaf(node)
        self.victims.drop(node)
        self.watches.on_removal(node)

    def _record_store_event(self, node: TreeNode) -> None:
        """Adds to what the engine does with each new leaf that what waits for it learns of it."""
        super()._record_store_event(node)
        self.watches.on_new_leaf(node)

    def _update_leaf_status(self, node: TreeNode) -> None:
        """Adds to the engine's bookkeeping of evictable leaves that a new one is listed for eviction."""
        super()._update_leaf_status(node)
        if node in self.evictable_leaves:
            self.victims.add(node)

    # ---- self-check ----

    def audit(self, holders: Iterable[TreeNode]) -> list[str]:
        """Every way in which the tree contradicts itself or the nodes that live requests hold; empty when sound.

        holders: one node per lock that a live request holds (the same node twice for two requests).
        """
        wrong: list[str] = []
        held: dict[int, int] = {}
        for node in holders:
            while node is not self.root_node:
                held[id(node)] = held.get(id(node), 0) + 1
                node = node.parent
                if node is None:
                    wrong.append("a live request holds a node of an earlier tree")
                    break
        evictable = protected = 0
        slots: list[int] = []
        leaves: set[TreeNode] = set()
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            slots.extend(node.value.tolist())
            expected = held.get(id(node), 0)
            if node.lock_ref != expected:
                wrong.append(f"node {node.id}: lock_ref {node.lock_ref}, {expected} live requests hold it")
            if len(node.key) != len(node.value) or len(node.key) % self.page_size:
                wrong.append(f"node {node.id}: {len(node.key)} tokens, {len(node.value)} slots")
            if node.lock_ref:
                protected += len(node.key)
            else:
                evictable += len(node.key)
                if not node.children:
                    leaves.add(node)
        if (evictable, protected) != (self.evictable_size_, self.protected_size_):
            wrong.append(
                f"counted {evictable} evictable and {protected} protected tokens, "
                f"the tree says {self.evictable_size_} and {self.protected_size_}"
            )
        unlisted = sum(node not in self.victims for node in leaves)
        if unlisted:
            wrong.append(f"{unlisted} evictable leaves are not listed for eviction")
        if leaves != self.evictable_leaves:
            wrong.append(f"{len(leaves)} evictable leaves, the tree lists {len(self.evictable_leaves)}")
        if len(set(slots)) != len(slots):
            wrong.append("one KV slot stands in the tree twice")
        return wrong
