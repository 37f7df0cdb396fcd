"""The decode tree of a worker with host memory, and the tree over host memory.

Both have one class, so that host memory too knows what queued requests match, evicts that last, and splits a leaf
to evict a part of it. Nodes evicted from the device's tree stay in the host tree.

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, path_to
from sglang.srt.mem_cache.node_saves import SavingTree

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.tier import HostTier
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["HostTierRadixCache", "HostTree", "host_tree", "is_in", "path_to"]


def is_in(tree: DecodeRadixCache, node: TreeNode) -> bool:
    """Whether a node (not the root) is still linked from its parent."""
    return node.parent.children.get(tree.get_child_key_fn(node.key)) is node


class HostTree(DecodeRadixCache):
    """The tree over host memory.

    Its KV events go into the device tree's event queue, in order, with host memory as their medium.
    """

    # The device tree's queue.
    events: Callable[[], list[Any]] = list

    def raise_priority(self, node: TreeNode, priority: int) -> None:
        """Raise ``node`` and its ancestors to this priority; a node's priority is never above its parent's."""
        while node is not self.root_node and node.priority < priority:
            node.priority = priority
            node = node.parent

    def count_use(self, node: TreeNode) -> None:
        """Count a use of the path to ``node`` for the eviction policy, also where nothing is inserted."""
        for used in path_to(self, node):
            self._inc_hit_count(used)

    def _record_store_event(self, node: TreeNode) -> None:
        super()._record_store_event(node)
        self._tell_events()

    def _record_remove_event(self, node: TreeNode) -> None:
        super()._record_remove_event(node)
        self._tell_events()

    def _record_all_cleared_event(self) -> None:
        """No event: the tree is cleared with the device's tree, whose event covers both."""

    def _tell_events(self) -> None:
        events = self.take_events()
        for event in events:
            assert isinstance(event, (BlockStored, BlockRemoved))
            event.medium = MEDIUM_CPU
        self.events().extend(events)


def host_tree(tree: DecodeRadixCache, size: int, kind: type[HostTree] = HostTree) -> HostTree:
    """A tree over ``size`` slots of host memory, with the parameters of ``tree``. The first page is not used."""
    page, dtype = tree.page_size, tree.pool.dtype
    if page == 1:
        slots: Any = TokenToKVPoolAllocator(size, dtype, "cpu", None, need_sort=False)
    else:
        slots = PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", None, need_sort=False)
    host = kind(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=slots,
            page_size=page,
            is_eagle=tree.is_eagle,
            eviction_policy=tree.eviction_policy,
            enable_kv_cache_events=tree.enable_kv_cache_events,
        )
    )
    host.events = lambda: tree.kv_event_queue
    return host


class HostTierRadixCache(SavingTree, DecodeRadixCache):
    """The decode tree of a worker with host memory."""

    def attach(self, tier: HostTier) -> None:
        """Start saving; the tree must be empty."""
        self.tier, self.saves = tier, tier.saves

    def reset(self) -> None:
        """Resets both trees after running copies have ended."""
        if self.saves is not None:
            self.tier.on_reset()
        super().reset()
