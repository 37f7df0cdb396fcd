"""Eviction of a decode tree's leaves, in the order of `eviction_order.py`.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["evict_leaves"]


def evict_leaves(
    tree: DecodeRadixCache,
    num_tokens: int,
    exact: bool,
    max_leaves: int | None = None,
    wanted_too: bool = True,
) -> int:
    """Evict leaves in the order of the eviction policy; what queued requests match goes last, if at all.

    Of a leaf that they match in part, the rest goes first. Among what they match, that for which fewest wait.

    exact: whether the last leaf keeps what need not go. max_leaves: None for as many as it takes.
    Returns the tokens that were freed.
    """
    start = time.perf_counter()
    if tree.eviction_policy == "mru":
        # The only policy by which a node in the list can move towards the front.
        tree.victims.list_anew()
    allocator = tree.pool
    batching = allocator.is_not_in_free_group
    if batching:
        allocator.free_group_begin()
    freed = _evict(tree, num_tokens, exact, max_leaves, wanted_too)
    if batching:
        allocator.free_group_end()
    tree.update_eviction_metrics(freed, start)
    return freed


def _evict(
    tree: DecodeRadixCache,
    num_tokens: int,
    exact: bool,
    max_leaves: int | None,
    wanted_too: bool,
) -> int:
    """The loop of `evict_leaves`."""
    freed = leaves = 0
    while freed < num_tokens and leaves != max_leaves:
        node = tree.victims.take_next()
        if node is not None:
            keep = tree.watches.wanted(node)
            if keep == len(node.key):
                tree.victims.spare(node)
                continue
        else:
            node = tree.victims.take_least_wanted() if wanted_too else None
            if node is None:
                break
            keep = 0
        leaves += 1
        if exact:
            keep = max(keep, (len(node.key) - (num_tokens - freed)) // tree.page_size * tree.page_size)
        if keep > 0:
            head = tree._split_node(node.key, node, keep)
            head.last_access_time, head.creation_time = node.last_access_time, node.creation_time
        tree._delete_leaf(node)
        tree.pool.free(node.value)
        freed += len(node.value)
        tree._record_remove_event(node)
    return freed
