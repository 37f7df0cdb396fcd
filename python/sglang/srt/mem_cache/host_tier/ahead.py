"""What an eviction would take next, so that it is saved before: the policy ``write_back``.

What is free and what evictions take first come to a part of the pool, and all of that is saved. So an eviction finds
its victims saved and waits for nothing; one that takes more at once than that part loses what is beyond it.

Upstream: none is known: the engine's own ``write_back`` copies when it evicts, and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["SaveAhead"]

# Part of the pool that is free or saved, and at least that much beyond what is kept free.
AHEAD_PART = 1 / 4
BEYOND_WATERMARK = 1 / 8
# Leaves that one look goes through, and turns of the scheduler's loop between two looks if nothing enters the tree.
LOOK_LEAVES = 128
LOOK_TURNS = 8


class SaveAhead:
    """The next leaves that evictions of one tree take."""

    def __init__(self, tree: DecodeRadixCache):
        self._tree = tree
        self._turns = 0
        # What `_changes` were when leaves were last listed anew.
        self._listed_at: tuple[int, ...] = ()

    def turn(self) -> bool:
        """Once in each turn of the scheduler's loop. Whether to look in this one: on all ranks alike."""
        self._turns += 1
        return self._turns % LOOK_TURNS == 0

    def unsaved(self, coming: int, is_saved: Callable[[TreeNode], bool]) -> list[TreeNode]:
        """The leaves among the next that are to be saved, in the order of eviction.

        coming: tokens that are locked while they are saved. is_saved: of a leaf, or is to be.
        """
        size = self._tree.pool_size
        wanted = max(int(size * AHEAD_PART), self._tree.watermark + int(size * BEYOND_WATERMARK))
        short = wanted - self._tree.pool.available_size() - coming
        if short <= 0:
            return []
        if self._tree.eviction_policy == "mru":
            # As an eviction does; but this is asked for in turn after turn.
            changes = self._changes()
            if changes != self._listed_at:
                self._tree.victims.list_anew()
                self._listed_at = changes
        return [node for node in self._tree.victims.upcoming(short, _goes_with, LOOK_LEAVES) if not is_saved(node)]

    def _changes(self) -> tuple[int, ...]:
        """Where no leaf has become another one's next, these are the same: who uses one inserts, locks or unlocks."""
        tree = self._tree
        return tree.generation, tree.growth, tree.locks_taken, tree.locks_released


def _goes_with(leaf: TreeNode) -> int:
    """Tokens of a leaf and of what is above it for it alone: they are saved with it, and go after it."""
    tokens, node = len(leaf.key), leaf.parent
    # The root is always locked.
    while node.lock_ref == 0 and len(node.children) == 1:
        tokens += len(node.key)
        node = node.parent
    return tokens
