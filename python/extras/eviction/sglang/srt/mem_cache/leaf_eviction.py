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
    """Layer of each decode tree: a maintained eviction order, and long free runs."""

    # Without the extra prefix_order nothing is known to be waited for.
    watches: Any = SimpleNamespace(wanted=lambda node: 0, waiting=lambda node: 0)

    def __init__(self, params: CacheInitParams):
        """Sets the free list's order, see ``mem_cache/allocator.py``."""
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
        """Replaces the core's: allocates long runs."""
        return self.pool.alloc_long_runs(num_tokens)

    def evict_shortfall(self, num_tokens: int) -> int:
        """Replaces the core's, which looks at all leaves on every call."""
        return evict_leaves(self, num_tokens, exact=True)

    def evict(self, params: EvictParams) -> EvictResult:
        """Replaces the engine's, which sorts all leaves on every call; same victims, same order."""
        return EvictResult(num_tokens_evicted=evict_leaves(self, params.num_tokens, exact=False))

    def evict_to_watermark(self) -> None:
        """Evict down to the watermark, a few leaves at a time; nothing that a waiting request matches.

        Without a watermark each request gets the pages of the leaves just evicted for it, and each decode step breaks
        the next long run. With it there are long and short runs to choose from. Requests may use all free memory.
        """
        short = self.watermark - self.pool.available_size()
        # Not page by page: each decode step takes a page, and each call has a fixed cost.
        if short > self.watermark * WATERMARK_SLACK:
            leaves = WATERMARK_LEAVES
            evict_leaves(self, short, exact=True, max_leaves=leaves, wanted_too=False)

    def no_longer_wanted(self, node: TreeNode) -> None:
        self.victims.no_longer_wanted(node)

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.victims.drop(node)

    def _update_leaf_status(self, node: TreeNode) -> None:
        """Lists a leaf once the engine counts it as evictable."""
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
    """Evict leaves by the eviction policy; what queued requests match goes last, if at all.

    A leaf matched in part first loses the rest. Among matched leaves those with the fewest waiting requests go first.

    exact: keep the part of the last leaf that need not go. max_leaves: None: no bound. Returns the freed tokens.
    """
    start = time.perf_counter()
    if tree.eviction_policy == "mru":
        # The only policy by which a listed node can move to the front.
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
