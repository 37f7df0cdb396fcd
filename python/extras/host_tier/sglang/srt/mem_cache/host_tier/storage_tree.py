"""The tree over host memory with a storage below it: each node knows what its pages are called there.

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
    """Has what enters it written, and tells of what leaves it."""

    # From when a storage is used until it is no more.
    writes: Writes | None = None
    # Told of slots that are given away.
    pages: Any = None
    # Whether what enters the tree now comes from the storage.
    inserts_fetched = False

    def insert_fetched(self, node: TreeNode, key: RadixKey, slots: torch.Tensor) -> tuple[int, TreeNode]:
        """As `insert_below`, of what the storage has."""
        self.inserts_fetched = True
        try:
            return insert_below(self, node, key, slots)
        finally:
            self.inserts_fetched = False

    def name_at(self, watch: Watch) -> bytes:
        """What the page is called behind which ``watch`` lacks something."""
        if watch.node is self.root_node:
            return first_hash(watch.extra_key)
        return watch.node.page_names[watch.in_last // self.page_size - 1]

    def _record_store_event(self, node: TreeNode) -> None:
        """A new leaf gets its names, and is written with what is missing above it."""
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
        """Names are divided; a write is of both parts."""
        upper = super()._split_node(key, child, split_len)
        if hasattr(child, "page_names"):
            split_names(upper, child, self.page_size)
            upper.write = child.write
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Its slots will be others'."""
        super()._delete_leaf(node)
        if self.pages is not None:
            self.pages.note_given_away(node.value)
