"""The order in which a decode tree evicts its leaves: by the eviction policy, and what queued requests match last.

A leaf's place is what it was when it was listed. What has happened to it since (it was used, locked, grown on, more
requests wait for it) is found out when its turn comes, so each change of the tree costs the logarithm of the number of
leaves at most.

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

# Entries that a heap may have for leaves that are not in it any more, beside as many as are.
STALE = 64


class EvictionOrder:
    """Leaves of one tree, each listed at most once.

    leaves: those that may be evicted, kept up by the tree. strategy: of the eviction policy. waiting: how many queued
    requests match a leaf to its end and wait.
    """

    def __init__(self, leaves: Set[TreeNode], strategy: EvictionStrategy, waiting: Callable[[TreeNode], int]):
        self._leaves, self._strategy, self._waiting = leaves, strategy, waiting
        # As (priority, node id, node). The id decides between equals, so that all TP ranks do alike.
        self._listed: set[TreeNode] = set()
        self._heap: list[tuple[Any, int, TreeNode]] = []
        # Leaves that came up and were spared, as requests wait for all of them: (how many, priority, node id, node).
        self._spared: set[TreeNode] = set()
        self._spared_heap: list[tuple[int, Any, int, TreeNode]] = []

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._listed or node in self._spared

    def add(self, node: TreeNode) -> None:
        """List a leaf that is not listed."""
        if node not in self:
            self._listed.add(node)
            heapq.heappush(self._heap, (self._strategy.get_priority(node), node.id, node))

    def drop(self, node: TreeNode) -> None:
        """``node`` has been evicted."""
        self._listed.discard(node)
        self._spared.discard(node)

    def list_anew(self) -> None:
        """List all leaves by what they are now, the spared ones too."""
        for heap in (self._listed, self._heap, self._spared, self._spared_heap):
            heap.clear()
        for leaf in self._leaves:
            self.add(leaf)

    def take_next(self) -> TreeNode | None:
        """Take the leaf that goes first off the list; None if there is none but those that were spared."""
        while self._heap:
            listed, _, node = heapq.heappop(self._heap)
            self._listed.discard(node)
            if node in self._leaves:
                if self._strategy.get_priority(node) == listed:
                    return node
                self.add(node)
        return None

    def spare(self, node: TreeNode) -> None:
        """Put a leaf that has been taken behind all others."""
        self._spared.add(node)
        heapq.heappush(self._spared_heap, self._place(node))
        if len(self._spared_heap) > 2 * len(self._spared) + STALE:
            self._spared_heap = [self._place(node) for node in self._spared]
            heapq.heapify(self._spared_heap)

    def take_least_wanted(self) -> TreeNode | None:
        """Take the spared leaf for which fewest requests wait, of these the first by the policy."""
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
        """A request does not wait for ``node`` any more: if that was spared, it takes its place among all again."""
        if node in self._spared:
            self._spared.discard(node)
            if node in self._leaves:
                self.add(node)

    def _place(self, node: TreeNode) -> tuple[int, Any, int, TreeNode]:
        return self._waiting(node), self._strategy.get_priority(node), node.id, node
