"""Which nodes of a tree are saved to a PegaFlow server, and what that holds of the pool meanwhile.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.pegaflow.calls import Save
from sglang.srt.mem_cache.pegaflow.room import Room

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
    from sglang.srt.mem_cache.pegaflow.tree import PegaFlowTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Saves", "Saving"]

# Part of the pool that may be held for saving.
SAVING_PART = 1 / 8


@dataclass(eq=False)
class Saving:
    """A save under way. nodes: what it is of; the first is locked, the others have been split off above it."""

    save: Save
    nodes: list[TreeNode]


class Saves:
    """The saves of one tree, under way and to come. saves: whether this rank saves, or another one for it."""

    def __init__(self, tree: PegaFlowTree, session: PegaFlowSession, saves: bool) -> None:
        self._tree, self._session, self._saves = tree, session, saves
        page = tree.page_size
        # Tokens of the pool that may be held, and that are.
        self._limit = max(page, int(tree.token_to_kv_pool_allocator.size * SAVING_PART) // page * page)
        self.tokens = 0
        self.under_way: list[Saving] = []
        # Nodes that are to be saved when there is room for it; a set in order.
        self.to_come: dict[TreeNode, None] = {}

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self.to_come)

    def want(self, node: TreeNode) -> None:
        """Have ``node`` saved, unless it is or the server is used no more."""
        if node.saved is None and node.saving is None and not self._session.stopped:
            self.to_come[node] = None

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower``. What is known is of both, as are a lock and a writer."""
        upper.saved, upper.saving, upper.writer = lower.saved, lower.saving, lower.writer
        if upper.saving is not None:
            upper.saving.nodes.append(upper)
        if lower in self.to_come:
            self.to_come[upper] = None

    def on_removal(self, node: TreeNode) -> None:
        """A node which is gone is saved no more."""
        self.to_come.pop(node, None)

    def start(self, room: Callable[[], Room]) -> None:
        """Have nodes saved as far as they do not hold too much of the pool; a large one in parts."""
        if self._session.stopped:
            self.to_come.clear()
        while (node := self._next()) is not None:
            tokens = min(len(node.key), self._limit)
            if self.tokens + tokens > self._limit:
                return
            if not room().take(node):
                # Others have their turn in the next step.
                self.to_come[node] = self.to_come.pop(node)
                return
            self._start(node if tokens == len(node.key) else self._tree._split_node(node.key, node, tokens))

    def _next(self) -> TreeNode | None:
        """The first to come that has been written: a step may raise after its pages have entered the tree."""
        written = self._tree.written
        return next((node for node in self.to_come if node.writer <= written), None)

    def _start(self, node: TreeNode) -> None:
        self.to_come.pop(node, None)
        # Its slots are copied on every split, so these stay what they are.
        save = Save(node.value, node.page_hashes)
        node.saving = Saving(save, [node])
        self._tree.inc_lock_ref(node)
        self.tokens += len(node.key)
        self.under_way.append(node.saving)
        if self._saves:
            self._session.save(save)
        else:
            save.done = save.saved = True

    def end(self, saving: Saving, saved: bool) -> None:
        """Unlock what a save held. saved: on all ranks; else it is saved again when it is met again."""
        self.under_way.remove(saving)
        self.tokens -= len(saving.save.slots)
        for node in saving.nodes:
            node.saving, node.saved = None, self._tree.step if saved else None
        self._tree.dec_lock_ref(saving.nodes[0])

    def learn(self, path: list[TreeNode], pages: int, missing: int, asked: int, asked_in: int) -> None:
        """Learn from an answer what of the tree the server has, and have saved what it lacks: it may have dropped pages
        to make room, or have been started anew.

        path: the nodes that hold what was asked for, ``asked`` pages, in the step ``asked_in``. pages: that all ranks
        have found. missing: of the ranks that were answered, the first page that one lacks.
        """
        end = 0
        for node in path:
            end += len(node.page_hashes)
            if end <= pages:
                node.saved = self._tree.step if node.saved is None else node.saved
                self.to_come.pop(node, None)
            elif missing < min(end, asked) and (node.saved is None or node.saved < asked_in):
                # What has just been saved may not be in the server's index yet.
                node.saved = None
                self.want(node)

    def let_go(self) -> list[Save]:
        """Forget all; returns what the server may still be reading."""
        saves = [saving.save for saving in self.under_way]
        self.tokens = 0
        self.under_way.clear()
        self.to_come.clear()
        return saves
