"""Which nodes of a tree are saved to a PegaFlow server, and what that holds of the pool meanwhile.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache import node_saves
from sglang.srt.mem_cache.page_names import name_pages, split_names
from sglang.srt.mem_cache.pegaflow.session import Save

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pegaflow.room import Room
    from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
    from sglang.srt.mem_cache.pegaflow.tree import PegaFlowTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Saves"]


class Saves(node_saves.Saves):
    """The saves of one tree. ``saved`` of a node is the step in which the server was known to have it."""

    def __init__(self, tree: PegaFlowTree, session: PegaFlowSession, saves: bool) -> None:
        """saves: whether this rank saves, or another one for it."""
        super().__init__(tree)
        self._steps, self._session, self._saves = tree, session, saves

    # ---- what happens to the tree ----

    def added(self, node: TreeNode, saved: int | None = None) -> None:
        """What has been loaded need not be saved."""
        name_pages(self._tree, node)
        # The step over prompts that is to write it.
        node.writer = self._steps.writing
        super().added(node, self._steps.step if self._steps.inserts_loaded else None)

    def used(self, node: TreeNode) -> None:
        if not self._session.stopped:
            super().used(node)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        super().on_split(upper, lower)
        upper.writer = lower.writer
        split_names(upper, lower, self._tree.page_size)

    # ---- a step ----

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
        written = self._steps.written
        return next((node for node in self.to_come if node.writer <= written), None)

    def _start(self, node: TreeNode) -> None:
        self.to_come.pop(node, None)
        # Its slots are copied on every split, so these stay what they are.
        save = Save(node.value, node.page_names)
        self.begin(node_saves.Saving([node], save))
        if self._saves:
            self._session.save(save)
        else:
            save.done = save.saved = True

    def learn(self, path: list[TreeNode], pages: int, missing: int, asked: int, asked_in: int) -> None:
        """Learn from an answer what of the tree the server has, and have saved what it lacks: it may have dropped pages
        to make room, or have been started anew.

        path: the nodes that hold what was asked for, ``asked`` pages, in the step ``asked_in``. pages: that all ranks
        have found. missing: of the ranks that were answered, the first page that one lacks.
        """
        end = 0
        for node in path:
            end += len(node.page_names)
            if end <= pages:
                node.saved = self._steps.step if node.saved is None else node.saved
                self.to_come.pop(node, None)
            elif missing < min(end, asked) and (node.saved is None or node.saved < asked_in):
                # What has just been saved may not be in the server's index yet.
                node.saved = None
                self.used(node)

    def let_go(self) -> list[Save]:
        """Forget all; returns what the server may still be reading."""
        saves = [saving.copy for saving in self.under_way]
        self.forget()
        return saves
