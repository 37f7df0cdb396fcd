"""The books of a decode tree, checked against themselves and the requests that are live.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["audit_tree"]


def audit_tree(tree: DecodeRadixCache, holders: Iterable[TreeNode]) -> list[str]:
    """Every way in which the tree contradicts itself or the nodes that live requests hold; empty when sound.

    holders: one node per lock that a live request holds (the same node twice for two requests).
    """
    wrong: list[str] = []
    held: dict[int, int] = {}
    for node in holders:
        while node is not tree.root_node:
            held[id(node)] = held.get(id(node), 0) + 1
            node = node.parent
            if node is None:
                wrong.append("a live request holds a node of an earlier tree")
                break
    evictable = protected = 0
    slots: list[int] = []
    leaves: set[TreeNode] = set()
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        slots.extend(node.value.tolist())
        expected = held.get(id(node), 0)
        if node.lock_ref != expected:
            wrong.append(f"node {node.id}: lock_ref {node.lock_ref}, {expected} live requests hold it")
        if len(node.key) != len(node.value) or len(node.key) % tree.page_size:
            wrong.append(f"node {node.id}: {len(node.key)} tokens, {len(node.value)} slots")
        if node.lock_ref:
            protected += len(node.key)
        else:
            evictable += len(node.key)
            if not node.children:
                leaves.add(node)
    if (evictable, protected) != (tree.evictable_size_, tree.protected_size_):
        wrong.append(
            f"counted {evictable} evictable and {protected} protected tokens, "
            f"the tree says {tree.evictable_size_} and {tree.protected_size_}"
        )
    unlisted = sum(node not in tree.victims for node in leaves)
    if unlisted:
        wrong.append(f"{unlisted} evictable leaves are not listed for eviction")
    if leaves != tree.evictable_leaves:
        wrong.append(f"{len(leaves)} evictable leaves, the tree lists {len(tree.evictable_leaves)}")
    if len(set(slots)) != len(slots):
        wrong.append("one KV slot stands in the tree twice")
    return wrong
