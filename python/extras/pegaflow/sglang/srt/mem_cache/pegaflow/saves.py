"""Chooses nodes of a tree to save to a PegaFlow server, and bounds what running saves lock in the pool.

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
    """The saves of one tree. A node's ``saved`` is the step in which the server was known to have it."""

    def __init__(self, tree: PegaFlowTree, session: PegaFlowSession, saves: bool) -> None:
        """saves: False if another rank saves for this one."""
        super().__init__(tree)
        self._steps, self._session, self._saves = tree, session, saves

    # ---- what happens to the tree ----

    def added(self, node: TreeNode, saved: int | None = None) -> None:
        """Loaded nodes count as saved."""
        name_pages(self._tree, node)
        # The prefill step that writes it.
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
        """Begin saves within the limit on locked tokens; large nodes in parts."""
        if self._session.stopped:
            self.to_come.clear()
        while (node := self._next()) is not None:
            tokens = min(len(node.key), self._limit)
            if self.tokens + tokens > self._limit:
                return
            if not room().take(node):
                # Others are tried in the next step.
                self.to_come[node] = self.to_come.pop(node)
                return
            self._start(node if tokens == len(node.key) else self._tree._split_node(node.key, node, tokens))

    def _next(self) -> TreeNode | None:
        """The first pending node that is written: a step may raise after its pages have entered the tree."""
        written = self._steps.written
        return next((node for node in self.to_come if node.writer <= written), None)

    def _start(self, node: TreeNode) -> None:
        self.to_come.pop(node, None)
        # A split replaces a node's slots by copies, so these do not change.
        save = Save(node.value, node.page_names)
        self.begin(node_saves.Saving([node], save))
        if self._saves:
            self._session.save(save)
        else:
            save.done = save.saved = True

    def learn(self, path: list[TreeNode], pages: int, missing: int, asked: int, asked_in: int) -> None:
        """Mark nodes of an answered look-up as saved, and save missing ones again: the server may have evicted them or
        been restarted.

        path: the nodes of the ``asked`` pages, looked up in step ``asked_in``. pages: found by all ranks. missing: the
        first page that any answered rank does not have.
        """
        end = 0
        for node in path:
            end += len(node.page_names)
            if end <= pages:
                node.saved = self._steps.step if node.saved is None else node.saved
                self.to_come.pop(node, None)
            elif missing < min(end, asked) and (node.saved is None or node.saved < asked_in):
                # Not if it was saved since: the server may not have indexed it yet.
                node.saved = None
                self.used(node)

    def let_go(self) -> list[Save]:
        """Cancel all; returns saves that the server may still be reading."""
        saves = [saving.copy for saving in self.under_way]
        self.forget()
        return saves
