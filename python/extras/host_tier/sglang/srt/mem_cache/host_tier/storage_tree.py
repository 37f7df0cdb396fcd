"""The tree over host memory with a storage below it: each node has the names of its pages.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.decode_radix_cache import insert_below
from sglang.srt.mem_cache.host_tier.storage_writes import Write
from sglang.srt.mem_cache.host_tier.tree import HostTree, path_to
from sglang.srt.mem_cache.page_names import first_hash, name_pages, split_names

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_writes import Writes
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

__all__ = ["StoredHostTree"]


class StoredHostTree(HostTree):
    """Writes new nodes to the storage, and counts freed slots."""

    # None before a storage is attached and after it is stopped.
    writes: Writes | None = None
    # Counts freed slots.
    pages: Any = None
    # Whether the current insertion comes from the storage.
    inserts_fetched = False

    def insert_fetched(self, node: TreeNode, key: RadixKey, slots: torch.Tensor) -> tuple[int, TreeNode]:
        """`insert_below` for pages read from the storage."""
        self.inserts_fetched = True
        try:
            return insert_below(self, node, key, slots)
        finally:
            self.inserts_fetched = False

    def name_at(self, watch: Watch) -> bytes:
        """Name of the last page of ``watch``'s prefix, to which the next page's name refers."""
        if watch.node is self.root_node:
            return first_hash(watch.extra_key)
        return watch.node.page_names[watch.in_last // self.page_size - 1]

    def _record_store_event(self, node: TreeNode) -> None:
        """Names a new leaf and writes it, along with ancestors that are not stored."""
        super()._record_store_event(node)
        if self.writes is None:
            return
        name_pages(self, node)
        if self.inserts_fetched:
            node.write = Write()
            return
        for one in path_to(self, node):
            if one is node or one.write.lost:
                one.write = self.writes.add(one.page_names, one.value)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Divides the names; both parts share the write."""
        upper = super()._split_node(key, child, split_len)
        if hasattr(child, "page_names"):
            split_names(upper, child, self.page_size)
            upper.write = child.write
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Counts the freed slots."""
        super()._delete_leaf(node)
        if self.pages is not None:
            self.pages.note_given_away(node.value)
