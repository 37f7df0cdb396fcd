"""What is copied of a tree's nodes to where its KV is kept beside its pool: host memory, or a PegaFlow server.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

__all__ = ["Saves", "Saving", "SavingTree"]

# Part of the pool that may be held for saving.
SAVING_PART = 1 / 8


@dataclass(eq=False)
class Saving:
    """A save under way. nodes: what it is of; the first is locked, the others have been split off above it.

    copy: what is being copied; whoever has begun it knows when it has ended.
    """

    nodes: list[TreeNode]
    copy: Any
    tokens: int = field(init=False)
    locked: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.tokens = len(self.nodes[0].key)


class Saves:
    """The nodes of one tree that are being saved, and those that are to be, in order.

    ``saved`` of a node says whether it has been, ``saving`` what does it now. One that could not be is saved when it
    is used again.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree, page = tree, tree.page_size
        # Tokens of the pool that may be held, and that are being saved.
        self._limit = max(page, int(tree.token_to_kv_pool_allocator.size * SAVING_PART) // page * page)
        self.tokens = 0
        self.under_way: list[Saving] = []
        self.to_come: dict[TreeNode, bool] = {}

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self.to_come)

    def locked(self) -> list[TreeNode]:
        """The nodes that are locked."""
        return [saving.nodes[0] for saving in self.under_way if saving.locked]

    # ---- what happens to the tree ----

    def added(self, node: TreeNode, saved: Any = None) -> None:
        """``node`` is new. saved: what it is from the start, see above."""
        node.saved, node.saving = saved, None
        self.used(node)

    def used(self, node: TreeNode) -> None:
        """``node`` has been used, and is worth a save."""
        if node.saved is None and node.saving is None:
            self.to_come.setdefault(node, False)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower``. What is known is of both, as is a lock."""
        upper.saved, upper.saving = lower.saved, lower.saving
        if upper.saving is not None:
            upper.saving.nodes.append(upper)
        if lower in self.to_come:
            self.to_come[upper] = False

    def on_removal(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        self.to_come.pop(node, None)

    # ---- a save ----

    def begin(self, saving: Saving) -> None:
        """Hold what is being copied."""
        (node,) = saving.nodes
        node.saving = saving
        self._tree.inc_lock_ref(node)
        self.tokens += saving.tokens
        self.under_way.append(saving)

    def unlock(self, saving: Saving) -> None:
        """Let go of it on the device: the copy has been taken."""
        if saving.locked:
            saving.locked = False
            self._tree.dec_lock_ref(saving.nodes[0])

    def end(self, saving: Saving, saved: Any) -> None:
        """All ranks know of its end. saved: None if on one of them it was not."""
        self.under_way.remove(saving)
        self.tokens -= saving.tokens
        for node in saving.nodes:
            node.saving, node.saved = None, saved
        self.unlock(saving)

    def forget(self) -> None:
        """The tree is reset."""
        self.tokens = 0
        self.under_way.clear()
        self.to_come.clear()


class SavingTree(RadixCache):
    """A tree whose nodes are saved, from when it has ``saves`` on."""

    saves: Saves | None = None

    def _record_store_event(self, node: TreeNode) -> None:
        """A new leaf is saved."""
        super()._record_store_event(node)
        if self.saves is not None:
            self.saves.added(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """A node that is met again may now be worth it; or it could not be saved before."""
        super()._inc_hit_count(node, chunked)
        # One that is being made is none yet.
        if self.saves is not None and hasattr(node, "saved"):
            self.saves.used(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """What is known of saves is known of both parts."""
        upper = super()._split_node(key, child, split_len)
        if self.saves is not None:
            self.saves.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        super()._delete_leaf(node)
        if self.saves is not None:
            self.saves.on_removal(node)
