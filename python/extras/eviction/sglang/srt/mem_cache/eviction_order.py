"""Eviction order of a decode tree's leaves: by the eviction policy, with leaves that queued requests match last.

A leaf's position is that of its listing. Later changes (use, lock, growth, waiting requests) are checked when its turn
comes. So each change of the tree costs at most the logarithm of the number of leaves.

Upstream: none is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.evict_policy import EvictionStrategy
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["EvictionOrder"]

# Outdated heap entries allowed beyond the number of leaves.
STALE = 64


class EvictionOrder:
    """Leaves of one tree, each listed at most once.

    leaves: the evictable ones, maintained by the tree. strategy: the eviction policy's. waiting: number of queued
    requests that match a leaf to its end.
    """

    def __init__(self, leaves: Set[TreeNode], strategy: EvictionStrategy, waiting: Callable[[TreeNode], int]):
        self._leaves, self._strategy, self._waiting = leaves, strategy, waiting
        # (priority, node id, node). The id breaks ties, so that all TP ranks agree.
        self._listed: set[TreeNode] = set()
        self._heap: list[tuple[Any, int, TreeNode]] = []
        # Leaves spared since requests match all of them: (number of requests, priority, node id, node).
        self._spared: set[TreeNode] = set()
        self._spared_heap: list[tuple[int, Any, int, TreeNode]] = []

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._listed or node in self._spared

    def add(self, node: TreeNode) -> None:
        """List a leaf, unless it is listed."""
        if node not in self:
            self._listed.add(node)
            heapq.heappush(self._heap, (self._strategy.get_priority(node), node.id, node))

    def drop(self, node: TreeNode) -> None:
        """``node`` has been evicted."""
        self._listed.discard(node)
        self._spared.discard(node)

    def list_anew(self) -> None:
        """List all leaves by their current state, also spared ones."""
        for heap in (self._listed, self._heap, self._spared, self._spared_heap):
            heap.clear()
        for leaf in self._leaves:
            self.add(leaf)

    def take_next(self) -> TreeNode | None:
        """Remove and return the first leaf; None if only spared ones are left."""
        while self._heap:
            listed, _, node = heapq.heappop(self._heap)
            self._listed.discard(node)
            if node in self._leaves:
                if self._strategy.get_priority(node) == listed:
                    return node
                self.add(node)
        return None

    def spare(self, node: TreeNode) -> None:
        """Move a leaf that was taken behind all others."""
        self._spared.add(node)
        heapq.heappush(self._spared_heap, self._place(node))
        if len(self._spared_heap) > 2 * len(self._spared) + STALE:
            self._spared_heap = [self._place(node) for node in self._spared]
            heapq.heapify(self._spared_heap)

    def take_least_wanted(self) -> TreeNode | None:
        """Remove and return the spared leaf with the fewest waiting requests, then by policy."""
        while self._spared_heap:
            entry = heapq.heappop(self._spared_heap)
            node = entry[-1]
            if node not in self._spared:
                continue
            if node in self._leaves:
                now = self._place(node)
                if now != entry:
                    heapq.heappush(self._spared_heap, now)
                    continue
            self._spared.discard(node)
            if node in self._leaves:
                return node
        return None

    def no_longer_wanted(self, node: TreeNode) -> None:
        """A request no longer waits for ``node``: list it again if it was spared."""
        if node in self._spared:
            self._spared.discard(node)
            if node in self._leaves:
                self.add(node)

    def _place(self, node: TreeNode) -> tuple[int, Any, int, TreeNode]:
        return self._waiting(node), self._strategy.get_priority(node), node.id, node
