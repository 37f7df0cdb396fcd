"""The tree of a decode worker whose KV is kept in host memory too, and the tree over host memory.

They are of one class, so that host memory too knows what queued requests match, evicts that last, and splits a leaf
where only a part of it has to go. What the device's tree evicts stays in the other one.

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.tier import HostTier
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

__all__ = ["HostTierRadixCache", "host_tree"]


def host_tree(tree: DecodeRadixCache, size: int) -> DecodeRadixCache:
    """A tree over ``size`` slots in host memory, from the second page on, for what ``tree`` holds or has held."""
    page, dtype = tree.page_size, tree.pool.dtype
    if page == 1:
        slots: Any = TokenToKVPoolAllocator(size, dtype, "cpu", None, need_sort=False)
    else:
        slots = PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", None, need_sort=False)
    host = DecodeRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=slots,
            page_size=page,
            is_eagle=tree.is_eagle,
            eviction_policy=tree.eviction_policy,
        )
    )
    # A watermark is for what prefill writes in long runs.
    host.watermark = 0
    return host


class HostTierRadixCache(DecodeRadixCache):
    """The decode tree of a worker with a host tier."""

    def attach(self, tier: HostTier) -> None:
        """Begin to save; the tree must be empty."""
        self.tier = tier

    @property
    def busy(self) -> bool:
        """Whether something is being saved, or soon will be."""
        return self.tier is not None and self.tier.saves.busy

    def nodes_in_use(self) -> list[TreeNode]:
        return [] if self.tier is None else self.tier.saves.locked()

    def reset(self) -> None:
        """Resets both trees, when copies have ended."""
        if self.tier is not None:
            self.tier.reset()
        super().reset()

    def _record_store_event(self, node: TreeNode) -> None:
        """A new leaf is saved."""
        super()._record_store_event(node)
        if self.tier is not None:
            self.tier.saves.used(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """A node that is met again may now be worth it; or it could not be saved before."""
        super()._inc_hit_count(node, chunked)
        if self.tier is not None and node.parent.children.get(self.get_child_key_fn(node.key)) is node:
            self.tier.saves.used(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """What is known of saves is known of both parts."""
        upper = super()._split_node(key, child, split_len)
        if self.tier is not None:
            self.tier.saves.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.tier is not None:
            self.tier.saves.on_removal(node)
