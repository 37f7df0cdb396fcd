"""Which nodes of a decode tree are copied to host memory, and what that holds of both pools meanwhile.

Upstream: none is known that saves what enters a decode tree.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.mem_cache.decode_radix_cache import insert_below
from sglang.srt.mem_cache.host_tier.tree import is_in, path_to
from sglang.srt.mem_cache.known_prefixes import is_known, note_known
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, PrefixPeek
    from sglang.srt.mem_cache.host_tier.ahead import SaveAhead
    from sglang.srt.mem_cache.host_tier.memory import Copy, HostMemory
    from sglang.srt.mem_cache.host_tier.tree import HostTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Saves", "Saving"]

logger = logging.getLogger(__name__)

# Part of the device's pool that may be held for saving.
SAVING_PART = 1 / 8


@dataclass(eq=False)
class Saving:
    """A save under way.

    node: of the device's tree, locked. above: where what the tree in host memory holds of its path ends, locked; held:
    how many tokens that is. key, slots: what is added below that, and where it goes. copy: None if it could not be
    begun. rest: whether more of the node is left to save.
    """

    node: TreeNode
    above: TreeNode
    held: int
    key: RadixKey
    slots: torch.Tensor
    copy: Copy | None
    rest: bool
    locked: bool = True

    def poll(self) -> int:
        """As a transfer's: the least of all ranks counts."""
        if self.copy is None:
            return int(KVPoll.Failed)
        return int(KVPoll.Success if self.copy.done() else KVPoll.Transferring)


class Given(NamedTuple):
    """What of a node that is to be saved host memory has been given already.

    tokens: from the prompt's start. end: where they end in the tree over host memory, for as long as that is there.
    """

    tokens: int = 0
    end: weakref.ref[TreeNode] | None = None


class Saves:
    """The saves of one rank; those under way are the same on all, whatever their trees hold, see `agreed.py`."""

    def __init__(
        self, tree: DecodeRadixCache, host: HostTree, memory: HostMemory, hits: int, ahead: SaveAhead | None = None
    ):
        """tree, host: of the device's pool, and of host memory. hits: after how many uses a node is saved.

        ahead: what evictions take next, if that is what is saved, however often it was used.
        """
        self._tree, self._host, self._memory, self.hits, self._ahead = tree, host, memory, hits, ahead
        page = tree.page_size
        self._limit = max(page, int(tree.pool_size * SAVING_PART) // page * page)
        self.under_way: list[Saving] = []
        # In order. A node that has been saved, or is to be, is marked; see `_MARK`.
        self.to_come: dict[TreeNode, Given] = {}
        # Whether there may be any on some rank. It goes by what was called, not by what came of it: the same on all.
        self.looking = False
        # Tokens since the start: saved, and not saved for want of room in host memory or since a copy failed; and
        # evicted before they were saved, or found to have been.
        self.saved_tokens = self.dropped_tokens = self.failed_tokens = self.late_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.under_way or self.to_come)

    @property
    def tokens(self) -> int:
        """Tokens that are being copied."""
        return sum(len(saving.slots) for saving in self.under_way)

    def locked(self) -> list[TreeNode]:
        """The nodes of the device's tree that saves have locked."""
        return [saving.node for saving in self.under_way if saving.locked]

    # ---- what happens to the device's tree ----

    def used(self, node: TreeNode) -> None:
        """``node`` is new, or has been met again. Of what slices bring, or who comes back, no use has been counted."""
        _raise_saved(self._host, node)
        self.looking = True
        if self._ahead is not None:
            if getattr(node, _MARK, None) is False:
                delattr(node, _MARK)
        elif max(1, node.hit_count) >= self.hits and not getattr(node, _MARK, False):
            setattr(node, _MARK, True)
            self.to_come[node] = NOTHING_YET

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has taken the first tokens of ``lower``. A save of that is of both."""
        if hasattr(lower, _MARK):
            setattr(upper, _MARK, getattr(lower, _MARK))

    def on_removal(self, node: TreeNode) -> None:
        """A node which is gone is saved no more, nor the rest of one that is under way and has let go of it."""
        given = self.to_come.pop(node, None)
        self.late_tokens += self._unsaved_part(node, given)
        setattr(node, _MARK, False)
        if given is not None:
            self._save_above(node)

    def _unsaved_part(self, node: TreeNode, given: Given | None) -> int:
        """Tokens of a leaf that are not known to be in host memory, and should be. given: if it is to be saved."""
        if given is None and hasattr(node, _MARK):
            part = next((one for one in self.under_way if one.node is node and one.rest), None)
            if part is not None:
                given = Given(part.held + len(part.slots))
            elif not self._is_lost(node):
                return 0
        elif given is None and self._ahead is None:
            # By the policy it was not worth it.
            return 0
        end = sum(len(one.key) for one in path_to(self._tree, node))
        return min(len(node.key), end - (NOTHING_YET if given is None else given).tokens)

    def is_next(self, node: TreeNode) -> bool:
        """Whether ``node``, which an eviction that has time would take, is saved first."""
        unsaved = node in self.to_come or not hasattr(node, _MARK)
        return self._ahead is not None and (unsaved or self._is_lost(node))

    def _is_lost(self, node: TreeNode) -> bool:
        """Whether host memory, under save-ahead, has evicted again what was saved of ``node``, which is in use here."""
        end = getattr(node, _END, None)
        if self._ahead is None or end is None or _live(self._host, end) is not None:
            return False
        return node not in self.to_come and all(one.node is not node for one in self.under_way)

    def _save_above(self, node: TreeNode) -> None:
        """``node`` was to be saved and is gone: what is left of its path is to be."""
        if getattr(node.parent, _MARK, False):
            self.to_come.setdefault(node.parent, NOTHING_YET)

    # ---- steps ----

    def turn(self) -> None:
        """Once in each turn of the scheduler's loop, on all ranks."""
        if self._ahead is not None and self._ahead.turn():
            self.looking = True

    def start(self) -> list[Saving]:
        """Begin saves, as far as they do not hold too much of the pool; of a large node a part.

        They are under way when `take` is told of them.
        """
        if self._ahead is not None:
            self._list_ahead(self._ahead)
        left, begun = self._limit - self.tokens, []
        if not self.to_come or left <= 0:
            return []
        saving = {saving.node for saving in self.under_way}
        for node in list(self.to_come):
            if left <= 0:
                break
            if not _is_below(node, saving):
                one = self._begin(node, left, self.to_come.pop(node))
                if one is not None:
                    begun.append(one)
                    saving.add(node)
                    left -= len(one.slots)
        return begun

    def _list_ahead(self, ahead: SaveAhead) -> None:
        for node in ahead.unsaved(self.tokens, lambda node: hasattr(node, _MARK) and not self._is_lost(node)):
            # It is noted anew, if there is one: what ends within a node there has none, and is not saved for ever.
            setattr(node, _END, None)
            setattr(node, _MARK, True)
            self.to_come[node] = NOTHING_YET

    def take(self, begun: Sequence[Saving]) -> None:
        """All ranks have begun these, and have as many to come."""
        self.under_way += begun
        self.looking = bool(self.to_come)

    def give_up(self, savings: Sequence[Saving]) -> None:
        """Ranks differ, and all come here: these are not saved, nor what is to come. The next use of it counts."""
        for saving in savings:
            self._drop(saving)
        self.under_way = [saving for saving in self.under_way if saving not in savings]
        for node, given in self.to_come.items():
            _unmark(self._tree, node, given.tokens)
        self.to_come.clear()
        self.looking = False

    def _begin(self, node: TreeNode, most: int, given: Given) -> Saving | None:
        """Begin to save what host memory lacks of the path to ``node``, at most so many tokens; None if nothing.

        If what it has been given before had to make room for others, the rest is not saved: they would take it from
        each other for ever. Cost: tokens behind what is known to be in host memory, and the nodes above.
        """
        path = path_to(self._tree, node)
        end, below, skipped = _end_of_known(self._host, path, given)
        parts = [one.key.token_ids for one in below]
        tokens = parts[0] if len(parts) == 1 else [token for part in parts for token in part]
        found = self._host.peek_below(end, tokens, skipped, node.key.extra_key)
        lacks = sum(len(one.key) for one in path) - found.length
        if not lacks:
            _note_end(path, found.length, found.path[-1], found.in_last)
            self._host.raise_priority(found.path[-1], node.priority)
            _mark_path(self._tree, node)
            return None
        above, slots = self._take(found, min(lacks, most) if found.length >= given.tokens else 0)
        if slots is None:
            _unmark(self._tree, node, found.length)
            self.dropped_tokens += lacks
            return None
        _note_end(path, found.length, above, found.in_last)
        stop = (start := len(tokens) - lacks) + len(slots)
        key = RadixKey(tokens[start:stop], node.key.extra_key, is_bigram=self._tree.is_eagle)
        self._tree.inc_lock_ref(node)
        copy = None
        try:
            copy = self._memory.save(slots, _slots_of(below, start, stop))
        except Exception as e:
            # Maybe on this rank only: all learn of it with the next reduction.
            logger.error("A copy of %d tokens to host memory failed", len(slots), exc_info=e)
        return Saving(node, above, found.length, key, slots, copy, rest=len(slots) < lacks)

    def _take(self, found: PrefixPeek, most: int) -> tuple[TreeNode, torch.Tensor | None]:
        """Lock what host memory holds and take slots for what follows, as many as there are up to ``most`` tokens.

        Without slots nothing has been locked.
        """
        host = self._host
        _, above = host.lock_prefix(found)
        if most > host.pool.available_size():
            host.evict_shortfall(most - host.pool.available_size())
        most = min(most, host.pool.available_size())
        slots = host.pool.alloc(most) if most else None
        if slots is None:
            host.dec_lock_ref(above)
        return above, slots

    def end(self, saving: Saving, saved: bool) -> None:
        """All ranks know of the end of a save. saved: on all of them."""
        self.under_way.remove(saving)
        node, host, slots = saving.node, self._host, saving.slots
        if not saved:
            self._drop(saving)
            return
        self.unlock(saving)
        before, last = insert_below(host, saving.above, saving.key, slots, node.priority)
        # Others have saved the same meanwhile.
        host.pool.free(slots[:before])
        host.dec_lock_ref(saving.above)
        self.saved_tokens += len(slots)
        if is_known(node):
            note_known(last)
        if not saving.rest:
            setattr(node, _END, weakref.ref(last))
            _mark_path(self._tree, node)
            return
        self.looking = True
        if getattr(node, _MARK):
            self.to_come[node] = Given(saving.held + len(slots), weakref.ref(last))
        else:
            self._save_above(node)

    def _drop(self, saving: Saving) -> None:
        """Give back what a save holds that has failed, or is given up."""
        if saving.copy is not None:
            # It may have failed on another rank only. What a storage brings into these slots is ordered by no stream.
            saving.copy.wait()
        self.unlock(saving)
        _unmark(self._tree, saving.node, saving.held)
        self.failed_tokens += len(saving.slots)
        self._host.pool.free(saving.slots)
        self._host.dec_lock_ref(saving.above)

    def unlock(self, saving: Saving) -> None:
        """Let go of the node on the device. The copy must have ended."""
        if saving.locked:
            saving.locked = False
            self._tree.dec_lock_ref(saving.node)

    def release_device(self) -> int:
        """Wait for what is under way and let go of its nodes, on all ranks alike. Returns how many were locked."""
        locked = [saving for saving in self.under_way if saving.locked]
        for saving in locked:
            if saving.copy is not None:
                saving.copy.wait()
            self.unlock(saving)
        return len(locked)

    def forget(self) -> None:
        """The trees are reset; copies have ended."""
        self.under_way.clear()
        self.to_come.clear()
        self.looking = False


# At the engine's nodes: whether it has been saved, or is to be (False: it could not be, until it is used again; without
# it nobody has looked); and where in the tree over host memory it ends. What a split takes from a node is its head, in
# either tree, so it keeps its end.
_MARK = "in_host_memory"
_END = "end_in_host_memory"
NOTHING_YET = Given()
# Of a node that was split: parts among which its end is looked for, in each use of each node of a path.
MOST_PARTS = 16
# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


def _live(host: HostTree, end: weakref.ref[TreeNode] | None) -> TreeNode | None:
    """The node that was noted, if it is still there."""
    node = None if end is None else end()
    return node if node is not None and is_in(host, node) else None


def _raise_saved(host: HostTree, node: TreeNode) -> None:
    """What has been saved of ``node`` is of its priority at least: a request of a higher one may have met it."""
    if host.eviction_policy != "priority":
        return
    one, behind, parts = node, 0, 1
    end = _live(host, getattr(node, _END, None))
    # Of a node that was split, the last part alone keeps its end; of one that is not marked, nothing has been saved.
    while end is None and parts < MOST_PARTS and one.children and getattr(node, _MARK, False):
        one = next(iter(one.children.values()))
        behind, parts = behind + len(one.key), parts + 1
        end = _live(host, getattr(one, _END, None))
    if end is None:
        return
    while behind >= len(end.key):
        behind -= len(end.key)
        end = end.parent
    host.raise_priority(end, node.priority)


def _mark_path(tree: DecodeRadixCache, node: TreeNode) -> None:
    """All of the path to ``node`` has been saved."""
    while node is not tree.root_node:
        setattr(node, _MARK, True)
        node = node.parent


def _unmark(tree: DecodeRadixCache, node: TreeNode, held: int) -> None:
    """Of the path to ``node``, what is behind ``held`` tokens is not in host memory: its next use counts."""
    path = path_to(tree, node)
    end = sum(len(one.key) for one in path)
    for one in reversed(path):
        if end <= held:
            return
        setattr(one, _MARK, False)
        end -= len(one.key)


def _end_of_known(host: HostTree, path: Sequence[TreeNode], given: Given) -> tuple[TreeNode, Sequence[TreeNode], int]:
    """Where host memory is known to hold the tokens of ``path`` up to.

    Returns its node that ends there, the nodes of the path from there on, and the tokens of the first of these that
    lie before.
    """
    end = sum(len(one.key) for one in path)
    last = _live(host, given.end)
    for i in range(len(path) - 1, -1, -1):
        saved = _live(host, getattr(path[i], _END, None))
        if saved is not None:
            return saved, path[i + 1 :], 0
        end -= len(path[i].key)
        if last is not None and given.tokens >= end:
            return last, path[i:], given.tokens - end
    return host.root_node, path, 0


def _note_end(path: Sequence[TreeNode], length: int, node: TreeNode, in_last: int) -> None:
    """Host memory holds so many tokens of ``path``, up to ``in_last`` of its ``node``."""
    end = sum(len(one.key) for one in path)
    for one in reversed(path):
        if end <= length:
            if end == length and in_last == len(node.key):
                setattr(one, _END, weakref.ref(node))
            return
        end -= len(one.key)


def _slots_of(nodes: Sequence[TreeNode], start: int, stop: int) -> torch.Tensor:
    """The slots of so many tokens of ``nodes``, counted from the start of the first; on the device, int64."""
    parts = []
    for node in nodes:
        if start < len(node.key) and stop > 0:
            parts.append(node.value[max(start, 0) : stop])
        start, stop = start - len(node.key), stop - len(node.key)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_below(node: TreeNode, others: Iterable[TreeNode]) -> bool:
    """Whether ``node`` is one of ``others``, or below one."""
    while node is not None:
        if node in others:
            return True
        node = node.parent
    return False
