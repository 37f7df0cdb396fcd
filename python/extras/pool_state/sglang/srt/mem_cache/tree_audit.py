"""Audit of a decode tree against itself, its pool's free list and the live requests.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.mem_cache.tier import Tier

__all__ = ["AuditedRadixCache", "audit_tree", "audit_unheld_pages"]

# Tokens whose slots (8 bytes each) are joined on the device before they are copied to the CPU.
AT_ONCE = 65_536


class AuditedRadixCache(DecodeRadixCache):
    """Layer of each decode tree that finds inconsistencies."""

    def audit(self, holders: Iterable[TreeNode]) -> list[str]:
        """Adds checks of locks, sizes and slots."""
        return super().audit(holders) + audit_tree(self, holders)


def audit_tree(tree: DecodeRadixCache, holders: Iterable[TreeNode]) -> list[str]:
    """Every inconsistency of the tree with itself, its pool or the locks of live requests; empty if none.

    holders: one node per lock of a live request (the same node twice for two requests).
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
    values: list[torch.Tensor] = []
    leaves: set[TreeNode] = set()
    for node in _nodes(tree):
        values.append(node.value)
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
    if leaves != tree.evictable_leaves:
        wrong.append(f"{len(leaves)} evictable leaves, the tree lists {len(tree.evictable_leaves)}")
    slots = _on_cpu(values)
    if len(torch.unique(slots)) != len(slots):
        wrong.append("one KV slot is in the tree twice")
    return wrong + _audit_free_pages(tree.pool, slots)


def audit_unheld_pages(tree: DecodeRadixCache, tier: Tier) -> list[str]:
    """Inconsistencies with no request holding pages: each must be free, in the tree or unreturned by ``tier``.

    Empty for an unknown type of allocator.
    """
    counted = _counted(tree.pool, _on_cpu([node.value for node in _nodes(tree)]))
    if counted is None:
        return []
    free, held = counted
    lost = int(((free + held)[1:] == 0).sum()) - tier.unreturned_tokens // tree.page_size
    if lost > 0:
        return [f"{lost} pages of KV are neither free nor in the tree"]
    return [f"{-lost} pages of KV are free or in the tree before {tier.name} has returned them"] if lost else []


def _audit_free_pages(pool: Any, slots: torch.Tensor) -> list[str]:
    """Inconsistencies of the free list of ``pool`` with itself and the tree's ``slots``."""
    counted = _counted(pool, slots)
    if counted is None:
        return []
    free, held = counted
    found = (
        (int(free[0]), "free pages of KV are none of the pool's"),
        (int(held[0]), "slots of the tree are none of the pool's"),
        (int((free[1:] > 1).sum()), "pages of KV are free more than once"),
        (int(((free > 0) & (held > 0))[1:].sum()), "pages of KV are free and in the tree"),
    )
    return [f"{count} {what}" for count, what in found if count]


def _on_cpu(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """All ``values`` in one CPU tensor; joined in parts, since the device may have little memory beside the pool."""
    brought, batch, size = [torch.empty(0, dtype=torch.int64)], list[torch.Tensor](), 0
    for part in (part for value in values for part in value.split(AT_ONCE)):
        if size + len(part) > AT_ONCE:
            brought.append(torch.cat(batch).cpu())
            batch, size = [], 0
        batch.append(part)
        size += len(part)
    return torch.cat([*brought, torch.cat(batch).cpu()] if batch else brought)


def _counted(pool: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How often each page of ``pool`` is in its free list, and how many of its slots are in ``slots``; on the CPU.

    By page; entry 0, which is never allocated, counts invalid pages. None for an unknown type of allocator.
    """
    if not isinstance(pool, (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator)):
        return None
    last = pool.size // pool.page_size

    def times(numbers: torch.Tensor) -> torch.Tensor:
        # Without a sort: a pool has millions of pages, and the scheduler waits for this.
        return torch.bincount(numbers.where((numbers > 0) & (numbers <= last), 0), minlength=last + 1)

    return times(_on_cpu([pool.free_pages, pool.release_pages])), times(slots // pool.page_size)


def _nodes(tree: DecodeRadixCache) -> Iterator[TreeNode]:
    """All nodes but the root."""
    stack = list(tree.root_node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
