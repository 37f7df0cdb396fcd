"""Chooses nodes of a decode tree to copy to host memory, and bounds what running saves lock in both pools.

Upstream: none is known that saves what enters a decode tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.mem_cache import node_saves
from sglang.srt.mem_cache.decode_radix_cache import insert_below
from sglang.srt.mem_cache.host_tier.tree import is_in
from sglang.srt.mem_cache.known_prefixes import is_known, note_known
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.host_tier.memory import Copy, HostMemory
    from sglang.srt.mem_cache.host_tier.tree import HostTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Saves", "Saving"]


class Saving(node_saves.Saving):
    """A running save of the tokens behind ``above`` in the host tree, which is locked."""

    copy: Copy

    def __init__(self, node: TreeNode, copy: Copy, above: TreeNode, key: RadixKey, slots: torch.Tensor):
        super().__init__([node], copy)
        self.above, self.key, self.slots, self.tokens = above, key, slots, len(slots)

    def poll(self) -> int:
        """As a transfer's poll; the minimum over ranks counts."""
        return int(KVPoll.Success if self.copy.done() else KVPoll.Transferring)


class Saves(node_saves.Saves):
    """The saves of one rank.

    A node is saved after its parent, since it is inserted below the parent's end in the host tree; each node keeps a
    reference to its own end. A large node is split and saved in parts.
    """

    under_way: list[Saving]  # type: ignore[assignment]

    def __init__(self, tree: DecodeRadixCache, host: HostTree, memory: HostMemory, hits: int):
        """tree, host: of the device's pool and of host memory. hits: uses after which a node is saved."""
        super().__init__(tree)
        self._host, self._memory, self.hits = host, memory, hits
        # Tokens since the start: saved; not saved because host memory was full; evicted before they were saved.
        self.saved_tokens = self.dropped_tokens = self.late_tokens = 0

    # ---- what happens to the device's tree ----

    def used(self, node: TreeNode) -> None:
        """Counts at least one use: insertions by chunks or by a returning request count none."""
        if max(1, node.hit_count) >= self.hits:
            super().used(node)

    def on_removal(self, node: TreeNode) -> None:
        if node in self.to_come:
            self.late_tokens += len(node.key)
        super().on_removal(node)

    # ---- a step ----

    def start(self) -> None:
        """Begin saves within the limit on locked tokens."""
        for node in list(self.to_come):
            left = self._limit - self.tokens
            if left <= 0:
                return
            above = node.parent
            if above not in self.to_come and getattr(above, "saving", None) is None:
                self._begin(node, self.to_come.pop(node), left)

    def _begin(self, node: TreeNode, waited: bool, most: int) -> None:
        """Save up to ``most`` tokens of ``node`` that host memory does not have; the rest stays pending.

        waited: whether the parent was saved for it. If the parent has been evicted again, the node is dropped: nodes
        would evict each other without end. Cost: the node's tokens and depth.
        """
        end = self._end_of(node.parent)
        if end is None:
            if waited:
                self.dropped_tokens += len(node.key)
                return
            node.parent.saved = None
            self.to_come[node.parent], self.to_come[node] = False, True
            return
        end, held = self._held_below(end, node)
        lacks = len(node.key) - held
        if not lacks:
            node.saved, node.end_in_host_memory = True, weakref.ref(end)
            self._host.raise_priority(end, node.priority)
            return
        slots = self._take(end, min(lacks, most))
        if slots is None:
            self.dropped_tokens += lacks
            return
        if len(slots) < lacks:
            rest, node = node, self._tree._split_node(node.key, node, held + len(slots))
            self.to_come[rest] = True
        key = RadixKey(node.key.token_ids[held:], node.key.extra_key, is_bigram=self._tree.is_eagle)
        self.begin(Saving(node, self._memory.save(slots, node.value[held:]), end, key, slots))

    def _end_of(self, node: TreeNode) -> TreeNode | None:
        """Where a node of the device's tree ends in the host tree; None if unknown."""
        if node is self._tree.root_node:
            return self._host.root_node
        # A split removes a node's head, in both trees, so its end stays the same.
        noted = getattr(node, "end_in_host_memory", None)
        end = None if noted is None else noted()
        return end if end is not None and is_in(self._host, end) else None

    def _held_below(self, end: TreeNode, node: TreeNode) -> tuple[TreeNode, int]:
        """The last host node with tokens of ``node``, which begins behind ``end``, and how many tokens it has."""
        host, held = self._host, 0
        for child, span in host.reader.descend(end, 0, node.key.token_ids, node.key.extra_key):
            end = child if span == len(child.key) else host._split_node(child.key, child, span)
            held += span
        return end, held

    def _take(self, end: TreeNode, most: int) -> torch.Tensor | None:
        """Lock the host node and take up to ``most`` slots for the tokens behind it.

        Returns None, with nothing locked, if there are no slots.
        """
        host = self._host
        host.inc_lock_ref(end)
        if most > host.pool.available_size():
            host.evict_shortfall(most - host.pool.available_size())
        most = min(most, host.pool.available_size())
        slots = host.pool.alloc(most) if most else None
        if slots is None:
            host.dec_lock_ref(end)
        return slots

    def end_all(self, polls: Sequence[int]) -> None:
        """All ranks have polled the running saves together."""
        for saving, poll in zip(self.under_way[:], polls, strict=True):
            if poll == KVPoll.Success:
                self._end(saving)

    def _end(self, saving: Saving) -> None:
        node, host, slots = saving.nodes[0], self._host, saving.slots
        self.end(saving, True)
        before, last = insert_below(host, saving.above, saving.key, slots, node.priority)
        # A part may have been saved by others meanwhile.
        host.pool.free(slots[:before])
        host.dec_lock_ref(saving.above)
        self.saved_tokens += len(slots)
        if is_known(node):
            note_known(last)
        node.end_in_host_memory = weakref.ref(last)

    def release_device(self) -> bool:
        """Wait for running saves and unlock their nodes, on all ranks alike. Returns whether any was locked."""
        locked = [saving for saving in self.under_way if saving.locked]
        for saving in locked:
            saving.copy.wait()
            self.unlock(saving)
        return bool(locked)
