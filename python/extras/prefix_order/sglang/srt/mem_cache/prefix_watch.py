"""Where prompts that wait stand in the decode tree, kept up to date by the tree's own changes.

A prompt is compared with the tree once, when its watch begins. After that only what changes in the tree moves it: a new
leaf behind its match, a split, an eviction. So a queue of any length can be ordered by what the tree holds of each
request without asking the tree again in every step, and the tree knows which nodes somebody waits for.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any

from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.prefix_reader import PrefixPeek
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

__all__ = ["PrefixWatches", "Watch", "WatchedRadixCache", "wanted_tokens"]

# Of those in one place, how many a prompt that arrives is compared with, and among how many they are looked for.
COMPARED, LOOKED_AT = 8, 64


class Watch:
    """A prompt and its place in the tree.

    token_ids: the prompt, as the tree's `keys_of` returns it. length: tokens of it that the tree holds, whole pages.
    node, in_last: where the match ends, and how many tokens of that node belong to it. leading: its request has been
    admitted and its KV is on the way; it no longer waits for what the tree holds. least: see `PrefixWatches.lead`.
    owner: whoever watches.

    text: names the prompt, also to those that outlive it. like, alike: a text, and how many tokens from the start,
    whole pages, are known to be the same in the prompt; maybe more are.
    """

    __slots__ = (
        *("token_ids", "extra_key", "owner", "length", "node", "in_last", "leading", "least", "place", "common"),
        *("text", "like", "alike", "put", "seen", "best", "group", "may", "_locked", "_free", "_unlocked"),
    )

    def __init__(self, token_ids: Sequence[Any], extra_key: str | None, owner: Any, root: TreeNode):
        self.token_ids = token_ids
        self.extra_key = extra_key
        self.owner = owner
        self.length = 0
        self.node, self.in_last = root, 0
        self.leading, self.least = False, 0
        # The next page of the prompt, as the tree tells children apart: requests of one place share at least that.
        self.place: tuple[int, Any] = (0, None)
        # Tokens from the start, whole pages, that it shares with each leader it was compared with, by their text: where
        # a leader is gone, its prompt is not kept.
        self.common: dict[object, int] = {}
        self.text = object()
        self.like: object = None
        self.alike = 0
        # The number of its coming to where it is. Of the leaders of its place, the last that it was compared with, by
        # that number, and the best of them with what that brings; see `PrefixWatches.leader`.
        self.put, self.seen = 0, -1
        self.best: tuple[Watch, int] | None = None
        # Those of its place, once it is in one; and which of the leaders there may be the best, if not all.
        self.group: _Group
        self.may: Callable[[Watch], bool] | None = None
        # The last node on its path that is locked and the first that is not, when the tokens from there were counted.
        self._locked: TreeNode | None = None
        self._free: TreeNode | None = None
        self._unlocked = 0

    def move(self, node: TreeNode, in_last: int, place: tuple[int, Any]) -> None:
        """Its match ends elsewhere; `length` is told apart."""
        self.node, self.in_last, self.place = node, in_last, place
        self._locked = self._free = None
        self.forget_leaders()

    def forget_leaders(self) -> None:
        """The best of them has to be looked for again."""
        self.seen, self.best = -1, None

    def known_with(self, other: Watch) -> int:
        """Tokens from the start, whole pages, that are known to be the same in both prompts; maybe more are."""
        if self.like is other.text:
            return self.alike
        if other.like is self.text:
            return other.alike
        return min(self.alike, other.alike) if self.like is other.like else 0

    def learn(self, other: Watch, shared: int) -> None:
        """It shares ``shared`` tokens with ``other``, and so with what that is like."""
        if shared > self.alike:
            self.like, self.alike = other.like if shared <= other.alike else other.text, shared

    def peek(self) -> PrefixPeek:
        """What `PrefixReader.peek` would find of the prompt. Cost: the depth of its node."""
        path: list[TreeNode] = []
        evictable, node, span = 0, self.node, self.in_last
        while node.parent is not None:
            path.append(node)
            if node.lock_ref == 0:
                evictable += span
            node = node.parent
            span = len(node.key.token_ids)
        path.reverse()
        return PrefixPeek(self.length, evictable, path, self.in_last)

    def unlocked_tokens(self) -> int:
        """Tokens of the prompt that the tree holds and nobody has locked.

        Cost: as many nodes as that are, if the end of what is locked has moved; what lies above a locked node is locked
        and what lies below one that is not is not, so otherwise all is as it was.
        """
        locked, free = self._locked, self._free
        if locked is not None and locked.lock_ref > 0:
            if free is None or (free.lock_ref == 0 and free.parent is locked):
                return self._unlocked
        node, span, tokens = self.node, self.in_last, 0
        free = None
        # The root is always locked.
        while node.lock_ref == 0:
            tokens += span
            free, node = node, node.parent
            span = len(node.key.token_ids)
        self._locked, self._free, self._unlocked = node, free, tokens
        return tokens


class _Group:
    """Watches of one place: prompts that share what the tree holds of them, and the page after that."""

    __slots__ = ("waiting", "leading", "newest")

    def __init__(self) -> None:
        self.waiting: dict[Watch, None] = {}
        self.leading: dict[Watch, None] = {}
        # The number of the last leader that has come here.
        self.newest = 0

    def __iter__(self) -> Iterator[Watch]:
        yield from self.waiting
        yield from self.leading

    def latest(self) -> Iterator[Watch]:
        """Those that wait, the last to come first, and then those that lead."""
        return chain(reversed(self.waiting), reversed(self.leading))

    def of(self, watch: Watch) -> dict[Watch, None]:
        return self.leading if watch.leading else self.waiting


def wanted_tokens(watches: PrefixWatches) -> int:
    """Tokens that some waiting prompt matches and nobody has locked, each once. Cost: the nodes that hold them."""
    ends = {node: watches.wanted(node) for node in watches._at if watches.waiting(node)}
    whole: set[TreeNode] = set()
    for node in ends:
        above = node.parent
        while above is not None and above.lock_ref == 0 and above not in whole:
            whole.add(above)
            above = above.parent
    tokens = sum(len(node.key) for node in whole)
    return tokens + sum(span for node, span in ends.items() if node.lock_ref == 0 and node not in whole)


class PrefixWatches:
    """All watches of one tree, by node, and there by place: how far into the node, and the page that comes next."""

    def __init__(self, tree: DecodeRadixCache, on_leave: Callable[[TreeNode], None]):
        """on_leave: told of a node that a waiting prompt no longer matches, or matches less of."""
        self._tree = tree
        self._on_leave = on_leave
        self._at: dict[TreeNode, dict[tuple[int, Any], _Group]] = {}
        # Leaders; and a number that is advanced when one comes or goes.
        self.on_the_way = 0
        self.leader_version = 0
        # How often a watch has come to a place, or begun to lead there: the leaders of each are in that order.
        self._puts = 0

    def __iter__(self) -> Iterator[Watch]:
        for places in self._at.values():
            for group in places.values():
                yield from group

    def add(self, token_ids: Sequence[int], extra_key: str | None, owner: Any = None) -> Watch:
        """Begin to watch a prompt. Cost: one `peek`, and comparisons with a few other prompts of its place.

        Many that wait for one prefix are so compared as they arrive, one by one, and not all in the step in which that
        is on its way, or comes.
        """
        keys = self._tree.reader.keys_of(self._tree.shareable(token_ids))
        watch = Watch(keys, extra_key, owner, self._tree.root_node)
        self._descend(watch, self._tree.root_node)
        if watch.place[1] is not None:
            self._find_like(watch)
        return watch

    def remove(self, watch: Watch) -> None:
        """End a watch."""
        group = self._take(watch)
        if watch.leading:
            self.leader_version += 1
            self.on_the_way -= 1
            for other in group.waiting:
                other.common.pop(watch.text, None)
                if other.may is not None or (other.best is not None and other.best[0] is watch):
                    other.forget_leaders()

    def lead(self, watch: Watch, least: int = 0) -> None:
        """The request of ``watch`` has been admitted: what the tree lacks of its prompt is on the way.

        least: tokens that it must bring of another prompt to be the `leader` of that.
        """
        del watch.group.waiting[watch]
        watch.leading, watch.least = True, least
        self._join(watch.group, watch)
        watch.common.clear()
        watch.forget_leaders()
        self.leader_version += 1
        self.on_the_way += 1
        self._on_leave(watch.node)

    def leader(self, watch: Watch) -> tuple[Watch, int] | None:
        """The prompt on the way that shares most with ``watch`` beyond what the tree holds, and how many tokens.

        Those that bring too little for what they bring in all are passed over, see `lead`, and those that `Watch.may`
        says no to. Cost: each pair of prompts is compared once, as far as they share more than is known; and a look at
        those that have come since this was last asked, at all of them where the best has gone.
        """
        group = watch.group
        if watch.seen != group.newest:
            # None of them can bring what the tree holds: all of it that can be shared.
            if watch.place[1] is not None:
                new = list(takewhile(lambda other: other.put > watch.seen, reversed(group.leading)))
                watch.best = self._best(watch, reversed(new), watch.best)
            watch.seen = group.newest
        return watch.best

    def _best(
        self, watch: Watch, leaders: Iterable[Watch], known: tuple[Watch, int] | None
    ) -> tuple[Watch, int] | None:
        """The best of ``leaders``, unless one that is ``known`` and was there before brings as much."""
        best, most = (None, 0) if known is None else known
        for other in leaders:
            shared = watch.common.get(other.text)
            if shared is None:
                shared = watch.common[other.text] = self._compare(watch, other)
            coming = shared - watch.length
            if coming > most and coming >= other.least and (watch.may is None or watch.may(other)):
                best, most = other, coming
        return None if best is None else (best, most)

    @property
    def moves(self) -> int:
        """Advanced when a prompt comes to another place of the tree, and when a leader comes or goes."""
        return self._puts + self.leader_version

    # ---- what eviction asks ----

    def wanted(self, node: TreeNode) -> int:
        """Tokens that some waiting prompt matches up to and not beyond."""
        places = self._at.get(node)
        if not places:
            return 0
        return max((place[0] for place, group in places.items() if group.waiting), default=0)

    def waiting(self, node: TreeNode) -> int:
        """Prompts whose match ends there and that wait."""
        return sum(len(group.waiting) for group in self._at.get(node, {}).values())

    # ---- what happens to the tree ----

    def on_reset(self) -> None:
        watches = list(self)
        self._at.clear()
        for watch in watches:
            watch.length = 0
            self._put(watch, self._tree.root_node, 0)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Thousands may wait there, and those of one place stay together."""
        places = self._at.pop(lower, None)
        if not places:
            return
        size = len(upper.key)
        for (in_last, following), group in places.items():
            node = upper if in_last <= size else lower
            place = (in_last if node is upper else in_last - size), following
            # Neither is known here yet, so this group is one there too.
            self._at.setdefault(node, {})[place] = group
            for watch in group:
                watch.move(node, place[0], place)
        self._on_leave(lower)

    def on_removal(self, node: TreeNode) -> None:
        """What comes next to all that ended in it is its first page."""
        places = self._at.pop(node, None)
        if not places:
            return
        parent, text = node.parent, object()
        full = 0 if parent is self._tree.root_node else len(parent.key)
        place = full, self._tree.get_child_key_fn(node.key)
        together = self._at.setdefault(parent, {}).setdefault(place, _Group())
        for group in places.values():
            for watch in group:
                if watch.length > watch.alike:
                    # All are like what ended here, should it come again.
                    watch.like, watch.alike = text, watch.length
                watch.length -= watch.in_last
                watch.move(parent, full, place)
                self._join(together, watch)

    def on_new_leaf(self, node: TreeNode) -> None:
        """Cost: those who wait for it are compared with it as far as is not known of another."""
        parent = node.parent
        places = self._at.get(parent)
        if not places:
            return
        full = 0 if parent is self._tree.root_node else len(parent.key)
        group = places.get((full, self._tree.get_child_key_fn(node.key)))
        if group is None:
            return
        keys = self._tree.reader.keys_in(node)
        # Of texts, how many tokens from the start the tree now has.
        held: dict[object, int] = {}
        for watch in list(group):
            self._take(watch)
            known = max(held.get(watch.text, 0), min(held.get(watch.like, 0), watch.alike))
            self._enter(watch, node, keys, known - watch.length)
            held[watch.text] = watch.length
            if watch.like is not None:
                held[watch.like] = max(held.get(watch.like, 0), min(watch.length, watch.alike))

    # ---- books ----

    def _find_like(self, watch: Watch) -> None:
        """Compare ``watch`` with a few of its place, the last to come first: who shares most with it is mostly there.

        Whoever is like a prompt that it was compared with, but not as far or farther, shares nothing new with it.
        """
        # Of texts, how many tokens it shares with them.
        told: dict[object, int] = {}
        compared = 0
        for other in islice(self._at[watch.node][watch.place].latest(), LOOKED_AT):
            if other is watch or other.text in told or told.get(other.like, other.alike) != other.alike:
                continue
            told[other.text] = shared = self._compare(watch, other)
            if shared != other.alike:
                told[other.like] = min(shared, other.alike)
            compared += 1
            if compared == COMPARED:
                break

    def _compare(self, watch: Watch, other: Watch) -> int:
        """Tokens, whole pages, that two prompts of one place share; what is known is not compared again."""
        known = max(watch.length, watch.known_with(other))
        shared = self._tree.reader.common_length(watch.token_ids, other.token_ids, known)
        watch.learn(other, shared)
        return shared

    def _enter(self, watch: Watch, leaf: TreeNode, keys: Sequence[Any], known: int) -> None:
        """Match on into ``leaf``, a child of the node at whose end ``watch`` stands.

        keys: the leaf's tokens, as `PrefixReader.keys_of` returns them. known: tokens of the leaf that are known to
        match; its first page does.
        """
        start, known = watch.length, max(known, self._tree.page_size)
        span = self._tree.reader.common_length(keys, watch.token_ids, known, start)
        watch.length += span
        self._put(watch, leaf, span)

    def _descend(self, watch: Watch, node: TreeNode) -> None:
        """Match on from the end of ``node``, at which ``watch`` stands."""
        in_last = 0 if node is self._tree.root_node else len(node.key)
        for child, span in self._tree.reader.descend(node, watch.length, watch.token_ids, watch.extra_key):
            node, in_last = child, span
            watch.length += span
        self._put(watch, node, in_last)

    def _put(self, watch: Watch, node: TreeNode, in_last: int) -> None:
        page = self._tree.page_size
        following = watch.token_ids[watch.length : watch.length + page]
        key = self._tree.get_child_key_fn(RadixKey(following, watch.extra_key)) if len(following) == page else None
        watch.move(node, in_last, (in_last, key))
        places = self._at.setdefault(node, {})
        group = places.get(watch.place)
        if group is None:
            group = places[watch.place] = _Group()
        self._join(group, watch)

    def _join(self, group: _Group, watch: Watch) -> None:
        self._puts += 1
        watch.put, watch.group = self._puts, group
        group.of(watch)[watch] = None
        if watch.leading:
            group.newest = watch.put

    def _take(self, watch: Watch) -> _Group:
        group = watch.group
        del group.of(watch)[watch]
        if not group.waiting and not group.leading:
            places = self._at[watch.node]
            del places[watch.place]
            if not places:
                del self._at[watch.node]
        if not watch.leading:
            self._on_leave(watch.node)
        return group


class WatchedRadixCache(DecodeRadixCache):
    """Layer of each decode tree that tells its watches what changes."""

    def __init__(self, *args: Any) -> None:
        self.watches = PrefixWatches(self, self.no_longer_wanted)
        super().__init__(*args)

    def reset(self) -> None:
        super().reset()
        self.watches.on_reset()

    def no_longer_wanted(self, node: TreeNode) -> None:
        """For another layer: see `PrefixWatches`."""

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        self.watches.on_split(upper, child)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.watches.on_removal(node)

    def _record_store_event(self, node: TreeNode) -> None:
        super()._record_store_event(node)
        self.watches.on_new_leaf(node)
