"""The tree over host memory with a storage below it: each node knows what its pages are called there.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.decode_radix_cache import insert_below
from sglang.srt.mem_cache.host_tier.storage_keys import first_hash, page_names
from sglang.srt.mem_cache.host_tier.storage_writes import Write
from sglang.srt.mem_cache.host_tier.tree import HostTree, path_to

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
    # What says that pages are in the storage already, of what is being inserted; None if that does not come from there.
    fetched: Write | None = None

    def insert_fetched(self, node: TreeNode, key: RadixKey, slots: torch.Tensor, cleared: int) -> tuple[int, TreeNode]:
        """As `insert_below`, of what the storage had when it had been cleared so often."""
        self.fetched = Write(cleared)
        try:
            return insert_below(self, node, key, slots)
        finally:
            self.fetched = None

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
        above = node.parent
        before = first_hash(node.key.extra_key) if above is self.root_node else above.page_names[-1]
        node.page_names = page_names(node.key.token_ids, self.page_size, before)
        node.write = self.fetched
        for one in () if self.fetched is not None else path_to(self, node):
            if one is node or self.writes.lacks(one.write):
                one.write = self.writes.add(one.page_names, one.value)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Names are divided; a write is of both parts."""
        upper = super()._split_node(key, child, split_len)
        if hasattr(child, "page_names"):
            pages = split_len // self.page_size
            upper.page_names, child.page_names = child.page_names[:pages], child.page_names[pages:]
            upper.write = child.write
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Its slots will be others'."""
        super()._delete_leaf(node)
        if self.pages is not None:
            self.pages.note_given_away(node.value)
