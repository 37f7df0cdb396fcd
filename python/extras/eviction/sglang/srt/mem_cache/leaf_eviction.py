"""Eviction of a decode tree's leaves, in the order of `eviction_order.py`, and down to a watermark.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from sglang.srt.mem_cache.free_watermark import WATERMARK_LEAVES, WATERMARK_SLACK, watermark_part

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["EvictingRadixCache", "evict_leaves"]


class EvictingRadixCache(DecodeRadixCache):
    """Layer of each decode tree that keeps its leaves listed for eviction, and some long runs of pages free."""

    # Without the extra prefix_order nothing is known to be waited for.
    watches: Any = SimpleNamespace(wanted=lambda node: 0, waiting=lambda node: 0)

    def __init__(self, params: CacheInitParams):
        """Adds the order of the free list: see ``mem_cache/allocator.py``."""
        super().__init__(params)
        self.pool.long_runs_last = True
        if self.state.has_pool:
            self.state.pool.long_runs_last = True
            self.state.alloc = self.state.pool.alloc_long_runs
        # Tokens to keep free, whole pages.
        self.watermark = int(watermark_part() * self.pool_size) // self.page_size * self.page_size

    def reset(self) -> None:
        super().reset()
        self.victims = EvictionOrder(self.evictable_leaves, self.eviction_strategy, self.watches.waiting)

    def alloc_delta(self, num_tokens: int) -> torch.Tensor | None:
        """Replaces the core's: out of long runs."""
        return self.pool.alloc_long_runs(num_tokens)

    def evict_shortfall(self, num_tokens: int) -> int:
        """Replaces the core's, which looks at all leaves on every call."""
        return evict_leaves(self, num_tokens, exact=True)

    def evict(self, params: EvictParams) -> EvictResult:
        """Replaces the engine's evict, which sorts all leaves on every call: the same victims in the same order."""
        return EvictResult(num_tokens_evicted=evict_leaves(self, params.num_tokens, exact=False))

    def evict_to_watermark(self) -> None:
        """Evict what the free list lacks to the watermark, a few leaves at a time; nothing that a request waits for.

        A pool without one hands each request the pages of whatever leaves just went for it, and each decode step cuts
        the next long run up: with it there are long runs and short ones to choose from. Requests may use all of what is
        kept free; it is not part of what they are budgeted.
        """
        short = self.watermark - self.pool.available_size()
        # Not a page at a time: that is what each decode step takes, and each eviction has its costs.
        if short > self.watermark * WATERMARK_SLACK:
            leaves = WATERMARK_LEAVES
            evict_leaves(self, short, exact=True, max_leaves=leaves, wanted_too=False)

    def no_longer_wanted(self, node: TreeNode) -> None:
        self.victims.no_longer_wanted(node)

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.victims.drop(node)

    def _update_leaf_status(self, node: TreeNode) -> None:
        """Lists a leaf for eviction once the engine counts it as evictable."""
        super()._update_leaf_status(node)
        if node in self.evictable_leaves:
            self.victims.add(node)

    def audit(self, holders: Iterable[TreeNode]) -> list[str]:
        """Adds leaves that are not listed."""
        unlisted = sum(node not in self.victims for node in self.evictable_leaves)
        more = [f"{unlisted} evictable leaves are not listed for eviction"] if unlisted else []
        return super().audit(holders) + more


def evict_leaves(
    tree: EvictingRadixCache,
    num_tokens: int,
    exact: bool,
    max_leaves: int | None = None,
    wanted_too: bool = True,
) -> int:
    """Evict leaves in the order of the eviction policy; what queued requests match goes last, if at all.

    Of a leaf that they match in part, the rest goes first. Among what they match, that for which fewest wait.

    exact: whether the last leaf keeps what need not go. max_leaves: None for as many as it takes.
    Returns the tokens that were freed.
    """
    start = time.perf_counter()
    if tree.eviction_policy == "mru":
        # The only policy by which a node in the list can move towards the front.
        tree.victims.list_anew()
    allocator = tree.pool
    batching = allocator.is_not_in_free_group
    if batching:
        allocator.free_group_begin()
    freed = _evict(tree, num_tokens, exact, max_leaves, wanted_too)
    if batching:
        allocator.free_group_end()
    tree.update_eviction_metrics(freed, start)
    return freed


def _evict(
    tree: EvictingRadixCache,
    num_tokens: int,
    exact: bool,
    max_leaves: int | None,
    wanted_too: bool,
) -> int:
    """The loop of `evict_leaves`."""
    freed = leaves = 0
    while freed < num_tokens and leaves != max_leaves:
        node = tree.victims.take_next()
        if node is not None:
            keep = tree.watches.wanted(node)
            if keep == len(node.key):
                tree.victims.spare(node)
                continue
        else:
            node = tree.victims.take_least_wanted() if wanted_too else None
            if node is None:
                break
            keep = 0
        leaves += 1
        if exact:
            keep = max(keep, len(node.key) - (num_tokens - freed))
        freed += tree.evict_leaf(node, keep)
    return freed
