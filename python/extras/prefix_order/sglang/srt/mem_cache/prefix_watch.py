"""Matches of waiting prompts in the decode tree, kept up to date by the tree's own changes.

A prompt is compared with the tree once, when its watch begins. Later only changes of the tree move its match: a new
leaf, a split, an eviction. So a queue of any length is ordered by cached prefix without new lookups in each step, and
the tree knows which nodes waiting requests match.

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

# Watches of one place that a new prompt is compared with, and among how many they are picked.
COMPARED, LOOKED_AT = 8, 64


class Watch:
    """A prompt and its place in the tree.

    token_ids: the prompt, as the tree's `keys_of` returns it. length: tokens of it in the tree, whole pages. node,
    in_last: where the match ends, and its tokens in that node. leading: its request is admitted and in transfer, and
    waits no longer. least: see `PrefixWatches.lead`. owner: its entry.

    text: identifies the prompt, also after its watch has ended. like, alike: another text, and the number of leading
    tokens, whole pages, known to be the same; more may be.
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
        # Key of the next page, as the tree distinguishes children: watches of one place share at least that.
        self.place: tuple[int, Any] = (0, None)
        # Tokens, whole pages, shared with each leader it was compared with, by the leader's text: ended leaders'
        # prompts are not kept.
        self.common: dict[object, int] = {}
        self.text = object()
        self.like: object = None
        self.alike = 0
        # Sequence number of its place. Then the last leader of the place that it was compared with, by that number,
        # and the best leader with its tokens; see `PrefixWatches.leader`.
        self.put, self.seen = 0, -1
        self.best: tuple[Watch, int] | None = None
        # The watches of its place; and a filter of leaders, if any.
        self.group: _Group
        self.may: Callable[[Watch], bool] | None = None
        # Last locked and first unlocked node on its path when the unlocked tokens were counted.
        self._locked: TreeNode | None = None
        self._free: TreeNode | None = None
        self._unlocked = 0

    def move(self, node: TreeNode, in_last: int, place: tuple[int, Any]) -> None:
        """Set the end of its match; `length` is set separately."""
        self.node, self.in_last, self.place = node, in_last, place
        self._locked = self._free = None
        self.forget_leaders()

    def forget_leaders(self) -> None:
        """Look for the best leader again."""
        self.seen, self.best = -1, None

    def known_with(self, other: Watch) -> int:
        """Leading tokens, whole pages, known to be the same in both prompts; more may be."""
        if self.like is other.text:
            return self.alike
        if other.like is self.text:
            return other.alike
        return min(self.alike, other.alike) if self.like is other.like else 0

    def learn(self, other: Watch, shared: int) -> None:
        """It shares ``shared`` tokens with ``other``, and so with other's ``like``."""
        if shared > self.alike:
            self.like, self.alike = other.like if shared <= other.alike else other.text, shared

    def peek(self) -> PrefixPeek:
        """As `PrefixReader.peek`. Cost: the depth of its node."""
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
        """Tokens of the prompt in the tree that no request has locked.

        Cost: their nodes, if the boundary has moved. Above a locked node all are locked, below an unlocked one none is;
        so otherwise the last count holds.
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
    """Watches of one place: prompts that share their match and the next page."""

    __slots__ = ("waiting", "leading", "newest")

    def __init__(self) -> None:
        self.waiting: dict[Watch, None] = {}
        self.leading: dict[Watch, None] = {}
        # Sequence number of the last leader here.
        self.newest = 0

    def __iter__(self) -> Iterator[Watch]:
        yield from self.waiting
        yield from self.leading

    def latest(self) -> Iterator[Watch]:
        """Waiting watches, newest first, then leading ones."""
        return chain(reversed(self.waiting), reversed(self.leading))

    def of(self, watch: Watch) -> dict[Watch, None]:
        return self.leading if watch.leading else self.waiting


def wanted_tokens(watches: PrefixWatches) -> int:
    """Unlocked tokens that some waiting prompt matches, each counted once. Cost: their nodes."""
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
    """All watches of one tree, by node and place: tokens into the node, and the next page."""

    def __init__(self, tree: DecodeRadixCache, on_leave: Callable[[TreeNode], None]):
        """on_leave: called with a node when a waiting prompt matches less of it."""
        self._tree = tree
        self._on_leave = on_leave
        self._at: dict[TreeNode, dict[tuple[int, Any], _Group]] = {}
        # Number of leaders; and a version that changes with them.
        self.on_the_way = 0
        self.leader_version = 0
        # Number of placements so far; leaders of a place are in this order.
        self._puts = 0

    def __iter__(self) -> Iterator[Watch]:
        for places in self._at.values():
            for group in places.values():
                yield from group

    def add(self, token_ids: Sequence[int], extra_key: str | None, owner: Any = None) -> Watch:
        """Begin to watch a prompt. Cost: one `peek`, and comparisons with a few prompts of its place.

        So prompts that wait for one prefix are compared one by one on arrival, not all in the step of its transfer or
        commit.
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
        """The request of ``watch`` is admitted: its delta is in transfer.

        least: tokens that another prompt must share with the delta to follow it.
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
        """The best leader for ``watch`` and the tokens it brings: the one that shares most beyond the tree's match.

        Leaders that share too little (`lead`) or that `Watch.may` rejects are skipped. Cost: one comparison per pair of
        prompts, of the part not known yet; and a look at leaders since the last call, or at all if the best has ended.
        """
        group = watch.group
        if watch.seen != group.newest:
            # Without a next page its whole shareable prompt is in the tree.
            if watch.place[1] is not None:
                new = list(takewhile(lambda other: other.put > watch.seen, reversed(group.leading)))
                watch.best = self._best(watch, reversed(new), watch.best)
            watch.seen = group.newest
        return watch.best

    def _best(
        self, watch: Watch, leaders: Iterable[Watch], known: tuple[Watch, int] | None
    ) -> tuple[Watch, int] | None:
        """The best of ``leaders``; ``known``, which is earlier, wins ties."""
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
        """Changes when a watch changes its place, and when a leader comes or goes."""
        return self._puts + self.leader_version

    # ---- for eviction ----

    def wanted(self, node: TreeNode) -> int:
        """Tokens of the node that waiting prompts match, if their match ends in it."""
        places = self._at.get(node)
        if not places:
            return 0
        return max((place[0] for place, group in places.items() if group.waiting), default=0)

    def waiting(self, node: TreeNode) -> int:
        """Number of waiting prompts whose match ends there."""
        return sum(len(group.waiting) for group in self._at.get(node, {}).values())

    # ---- changes of the tree ----

    def on_reset(self) -> None:
        watches = list(self)
        self._at.clear()
        for watch in watches:
            watch.length = 0
            self._put(watch, self._tree.root_node, 0)

    def on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Thousands may wait there: groups move as a whole."""
        places = self._at.pop(lower, None)
        if not places:
            return
        size = len(upper.key)
        for (in_last, following), group in places.items():
            node = upper if in_last <= size else lower
            place = (in_last if node is upper else in_last - size), following
            # Its place is new in either node, so groups need no merging.
            self._at.setdefault(node, {})[place] = group
            for watch in group:
                watch.move(node, place[0], place)
        self._on_leave(lower)

    def on_removal(self, node: TreeNode) -> None:
        """Watches that ended in it move to its parent, with its first page as their next."""
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
                    # They share this match, should it come again.
                    watch.like, watch.alike = text, watch.length
                watch.length -= watch.in_last
                watch.move(parent, full, place)
                self._join(together, watch)

    def on_new_leaf(self, node: TreeNode) -> None:
        """Cost: a comparison of each watch that waits for it, of the part not known from another."""
        parent = node.parent
        places = self._at.get(parent)
        if not places:
            return
        full = 0 if parent is self._tree.root_node else len(parent.key)
        group = places.get((full, self._tree.get_child_key_fn(node.key)))
        if group is None:
            return
        keys = self._tree.reader.keys_in(node)
        # By text: leading tokens that the tree now holds.
        held: dict[object, int] = {}
        for watch in list(group):
            self._take(watch)
            known = max(held.get(watch.text, 0), min(held.get(watch.like, 0), watch.alike))
            self._enter(watch, node, keys, known - watch.length)
            held[watch.text] = watch.length
            if watch.like is not None:
                held[watch.like] = max(held.get(watch.like, 0), min(watch.length, watch.alike))

    # ---- tables ----

    def _find_like(self, watch: Watch) -> None:
        """Compare ``watch`` with a few of its place, newest first: the closest prompt is mostly among these.

        A prompt that shares less with one already compared shares nothing new and is skipped.
        """
        # By text: tokens that it shares.
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
        """Tokens, whole pages, shared by two prompts of one place; the known part is not compared again."""
        known = max(watch.length, watch.known_with(other))
        shared = self._tree.reader.common_length(watch.token_ids, other.token_ids, known)
        watch.learn(other, shared)
        return shared

    def _enter(self, watch: Watch, leaf: TreeNode, keys: Sequence[Any], known: int) -> None:
        """Match on into ``leaf``, a child of the node where the match of ``watch`` ends.

        keys: the leaf's, as `PrefixReader.keys_of` returns them. known: tokens of the leaf known to match, at least one
        page.
        """
        start, known = watch.length, max(known, self._tree.page_size)
        span = self._tree.reader.common_length(keys, watch.token_ids, known, start)
        watch.length += span
        self._put(watch, leaf, span)

    def _descend(self, watch: Watch, node: TreeNode) -> None:
        """Match on from the end of ``node``, where the match of ``watch`` ends."""
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
