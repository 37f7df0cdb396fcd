"""The tree over host memory with a storage below it: each node knows what its pages are called there.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.decode_radix_cache import insert_below
from sglang.srt.mem_cache.host_tier.storage_keys import first_hash, page_names
from sglang.srt.mem_cache.host_tier.tree import HostTree, path_to

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.host_tier.storage_writes import Write, Writes
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

__all__ = ["StoredHostTree"]

# Somebody may remove files that are old, and what comes behind them would be written for nobody. So what is above a new
# leaf is looked for again if that was done longer ago.
LOOK_AGAIN_S = 600.0


class StoredHostTree(HostTree):
    """Has what enters it written, and tells of what leaves it."""

    # From when a storage is used until it is no more.
    writes: Writes | None = None
    # Told of slots that are given away.
    pages: Any = None
    # As of when what is being inserted is in the storage; None if it does not come from there.
    fetched_in: int | None = None
    # What was written before it was cleared is not there. Advanced by the thread that writes, and nobody else.
    cleared = 0

    def insert_fetched(
        self, node: TreeNode, key: RadixKey, slots: torch.Tensor, stored_in: int
    ) -> tuple[int, TreeNode]:
        """As `insert_below`, of what the storage had when ``cleared`` was ``stored_in``."""
        self.fetched_in = stored_in
        try:
            return insert_below(self, node, key, slots)
        finally:
            self.fetched_in = None

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
        # Once each, since another thread advances them: what is older counts for less.
        cleared, now = self.cleared, time.monotonic()
        # What writes it, None if it comes from the storage; and as of when.
        node.write, node.stored_in, node.looked_for = None, cleared, now
        if self.fetched_in is not None:
            node.stored_in = self.fetched_in
            return
        for one in path_to(self, node):
            if one is node or self._may_lack(one, cleared, now):
                # Of the root, and of what came from the storage, there is none.
                above = getattr(one.parent, "write", None)
                one.write = self.writes.add(one.page_names, one.value, above)
                one.stored_in, one.looked_for = cleared, now

    @staticmethod
    def _may_lack(node: TreeNode, cleared: int, now: float) -> bool:
        """Whether pages of ``node`` may not be in the storage."""
        write: Write | None = node.write
        lost = write is not None and write.lost
        return lost or node.stored_in != cleared or now - node.looked_for > LOOK_AGAIN_S

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Names are divided; a write is of both parts."""
        upper = super()._split_node(key, child, split_len)
        if hasattr(child, "page_names"):
            pages = split_len // self.page_size
            upper.page_names, child.page_names = child.page_names[:pages], child.page_names[pages:]
            upper.write, upper.stored_in, upper.looked_for = child.write, child.stored_in, child.looked_for
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Its slots will be others'."""
        super()._delete_leaf(node)
        if self.pages is not None:
            self.pages.note_given_away(node.value)
