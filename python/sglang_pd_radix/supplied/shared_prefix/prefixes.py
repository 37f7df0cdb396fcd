"""Which running requests share which KV slots: a radix tree of the rows of ``req_to_token``.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Slots = np.ndarray[Any, np.dtype[np.int32]]


class Node:
    """The slots of positions ``start`` to ``end``, which all rows in ``members`` have."""

    __slots__ = ("start", "slots", "parent", "children", "members")

    def __init__(self, start: int, slots: Slots, parent: Node | None, members: set[int]) -> None:
        self.start, self.slots, self.parent, self.members = start, slots, parent, members
        self.children: dict[int, Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


class RunningPrefixes:
    """The tree of the rows that run, by slot, so that two rows are below one node as far as they have the same slots.

    Slots and not tokens: what a prefix cache shares has the same slots in every row, whichever cache that is, and what
    merely reads the same has not. Nodes end with pages of ``page_size`` tokens. A row costs something when it enters or
    leaves, one vectorised comparison a level, and nothing in the steps between.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(0, np.empty(0, np.int32), None, set())
        self._leaves: dict[int, Node] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._leaves

    def rows(self) -> set[int]:
        return set(self._leaves)

    def add(self, row: int, slots: Slots) -> None:
        """Let a row in; ``slots`` are those it has, the last of which is its own."""
        slots = slots[: (len(slots) - 1) // self.page_size * self.page_size]
        node = self.root
        node.members.add(row)
        while node.end < len(slots):
            child = node.children.get(int(slots[node.end]))
            if child is None:
                child = Node(node.end, slots[node.end :].copy(), node, {row})
                node.children[int(child.slots[0])] = child
            else:
                theirs, ours = child.slots, slots[child.start : child.end]
                differ = theirs[: len(ours)] != ours
                same = int(differ.argmax()) if differ.any() else len(ours)
                same -= same % self.page_size
                if same == 0:
                    # They part within the first page, which a cache does not let them: the row has this to itself.
                    break
                if same < len(theirs):
                    child = self._split(child, same)
                child.members.add(row)
            node = child
        self._leaves[row] = node

    def remove(self, row: int) -> None:
        """Let a row out."""
        node: Node | None = self._leaves.pop(row)
        while node is not None:
            parent = node.parent
            node.members.discard(row)
            if parent is not None and not node.members:
                del parent.children[int(node.slots[0])]
            elif parent is not None and len(node.children) == 1:
                (child,) = node.children.values()
                if len(child.members) == len(node.members):
                    self._join(node, child)
            node = parent

    def shared(self) -> Iterator[Node]:
        """The nodes of two rows and more, parents before children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not self.root:
                yield node
            stack += [child for child in node.children.values() if len(child.members) > 1]

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after ``length`` slots. Returns its head."""
        parent = node.parent
        assert parent is not None
        head = Node(node.start, node.slots[:length], parent, set(node.members))
        parent.children[int(head.slots[0])] = head
        node.start, node.slots, node.parent = head.end, node.slots[length:], head
        head.children[int(node.slots[0])] = node
        return head

    def _join(self, node: Node, child: Node) -> None:
        """Let a node take over its only child, which has the same rows."""
        node.slots, node.children = np.concatenate([node.slots, child.slots]), child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for row in child.members:
            if self._leaves[row] is child:
                self._leaves[row] = node
