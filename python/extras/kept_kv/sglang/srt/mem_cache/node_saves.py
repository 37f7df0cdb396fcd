"""Copies of tree nodes to HiCache L2 or a PegaFlow server.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

__all__ = ["Saves", "Saving", "SavingTree"]

# Part of the pool that saves may lock.
SAVING_PART = 1 / 8


@dataclass(eq=False)
class Saving:
    """A save in flight. nodes: the first is locked, the others have been split off above it.

    copy: the copy's handle, for the code that started it.
    """

    nodes: list[TreeNode]
    copy: Any
    tokens: int = field(init=False)
    locked: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.tokens = len(self.nodes[0].key)


class Saves:
    """The saves of one tree, in flight and pending, in order.

    A node's ``saved`` is what has been saved, its ``saving`` the save in flight. A failed save is repeated when the
    node is used again.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree, page = tree, tree.page_size
        # Tokens that may be locked, and tokens being saved.
        self._limit = max(page, int(tree.token_to_kv_pool_allocator.size * SAVING_PART) // page * page)
        self.tokens = 0
        self.under_way: list[Saving] = []
        self.to_come: dict[TreeNode, bool] = {}

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self.to_come)

    def locked(self) -> list[TreeNode]:
        """The locked nodes."""
        return [saving.nodes[0] for saving in self.under_way if saving.locked]

    # ---- changes of the tree ----

    def added(self, node: TreeNode, saved: Any = None) -> None:
        """``node`` is new. saved: its initial ``saved``."""
        node.saved, node.saving = saved, None
        self.used(node)

    def used(self, node: TreeNode) -> None:
        """``node`` has been used: save it."""
        if node.saved is None and node.saving is None:
            self.to_come.setdefault(node, False)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower``. State and lock apply to both."""
        upper.saved, upper.saving = lower.saved, lower.saving
        if upper.saving is not None:
            upper.saving.nodes.append(upper)
        if lower in self.to_come:
            self.to_come[upper] = False

    def on_removal(self, node: TreeNode) -> None:
        """Do not save a removed node."""
        self.to_come.pop(node, None)

    # ---- a save ----

    def begin(self, saving: Saving) -> None:
        """Lock what is being copied."""
        (node,) = saving.nodes
        node.saving = saving
        self._tree.inc_lock_ref(node)
        self.tokens += saving.tokens
        self.under_way.append(saving)

    def unlock(self, saving: Saving) -> None:
        """The device copy is done: unlock the node."""
        if saving.locked:
            saving.locked = False
            self._tree.dec_lock_ref(saving.nodes[0])

    def end(self, saving: Saving, saved: Any) -> None:
        """The save has ended on all ranks. saved: None if it failed on one of them."""
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
    """A tree whose nodes are saved once ``saves`` is set."""

    saves: Saves | None = None

    def _record_store_event(self, node: TreeNode) -> None:
        """Saves a new leaf."""
        super()._record_store_event(node)
        if self.saves is not None:
            self.saves.added(node)

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        """Saves a node on a repeated hit, or after a failed save."""
        super()._inc_hit_count(node, chunked)
        # A node under construction has no ``saved`` yet.
        if self.saves is not None and hasattr(node, "saved"):
            self.saves.used(node)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Applies the save state to both parts."""
        upper = super()._split_node(key, child, split_len)
        if self.saves is not None:
            self.saves.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        """Cancels the save of a removed node."""
        super()._delete_leaf(node)
        if self.saves is not None:
            self.saves.on_removal(node)
