"""Who is admitted next: the decisions of a decode worker's admission, without the worker.

Plain data in and out, so that they can be tested and simulated by themselves; decode.py brings the data and carries the
decisions out. All figures are tokens unless said otherwise.

* **Order.** First come, first served, except that requests of whose prompt most is in the tree, or on its way there, go
  first. Nobody is overtaken more often than a bound; who has been goes before everybody else. A request never goes
  ahead of one of higher priority. The engine's ``lpm`` and ``dfs-weight`` orders of its aggregated scheduler are the
  precedent; they know no bound.
* **Following.** A request whose prompt extends one that is being transferred waits for that transfer to be committed,
  and then needs only what lies beyond it. What it will need is kept for it meanwhile. It waits only where most of what
  it waits for is of use to it, and no longer than a copy of its own would take.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.prefix_watch import Watch

__all__ = ["Candidate", "Line", "Place", "Patience", "Standing", "Transfers", "admission_order", "pays_to_follow"]


class Standing(enum.IntEnum):
    """What decides the order between requests of one priority."""

    OVERTAKEN = 0  # as often as the bound allows
    SHARED = 1  # most of its prompt is held by requests: it takes least, and leaves with what it brought
    HELD = 2  # most of its prompt is in the tree or on the way
    OTHER = 3


@dataclasses.dataclass(slots=True)
class Candidate:
    """A queued request that has shaken hands, as its place in the order is decided.

    arrival: its number in the order of arrival. priority: lower goes first. prompt: its length. held: in the tree,
    whole pages. unlocked: of these, held by no request. coming: beyond ``held``, brought by a transfer under way for
    which it waits; 0 if it does not wait. overtaken: requests that came later and were admitted before it.
    """

    arrival: int
    priority: int
    prompt: int
    held: int
    unlocked: int
    coming: int
    overtaken: int

    def standing(self, max_overtaken: int) -> Standing:
        """Its class. ``max_overtaken``: 0 makes the order that of arrival."""
        if self.overtaken >= max_overtaken:
            return Standing.OVERTAKEN
        if 2 * (self.held - self.unlocked) >= self.prompt:
            return Standing.SHARED
        if 2 * (self.held + self.coming) >= self.prompt:
            return Standing.HELD
        return Standing.OTHER


def admission_order(candidates: Sequence[Candidate], max_overtaken: int) -> list[int]:
    """Indices of ``candidates`` in the order in which they are to be admitted."""
    keys = [(c.priority, c.standing(max_overtaken), c.arrival) for c in candidates]
    return sorted(range(len(candidates)), key=keys.__getitem__)


def pays_to_follow(coming: int, leader_lacked: int) -> bool:
    """Whether a prompt of which a transfer brings ``coming`` tokens should wait for it.

    leader_lacked: all that the transfer brings. Where it is mostly the leader's own, the wait is for that.
    """
    return 2 * coming >= leader_lacked


@dataclasses.dataclass(slots=True)
class Patience:
    """How long a request waits for the transfer of another, seconds.

    A leader's prefill works in the order in which it was asked. A copy that a follower asked of the *same* prefill
    would come after the leader's, so it may wait for as long as that is alive: twice as long as the slowest transfer of
    late would take for as many tokens. Another prefill would start at once, and the wait is for what the wait saves:
    the transfer, at the pace of that prefill.
    """

    # Of a transfer of any size, and while nothing is known of a prefill yet.
    least: float = 1.0
    unknown_same: float = 10.0

    def allowed(self, same: bool, seconds_per_token: float | None, lacked: int, coming: int) -> float:
        """same: whether leader and follower have one prefill. seconds_per_token: the slowest of late of the follower's.

        lacked: tokens that the leader's transfer brings. coming: how many of them the follower shares.
        """
        if same:
            return self.unknown_same if seconds_per_token is None else max(self.least, 2 * seconds_per_token * lacked)
        return self.least if seconds_per_token is None else seconds_per_token * coming


class Transfers:
    """How long the transfers of each prefill took of late, from admission to commit."""

    KEPT = 32
    # What a transfer of fewer tokens takes is not for its tokens.
    LEAST_TOKENS = 256

    def __init__(self) -> None:
        self._paces: dict[Hashable, deque[float]] = {}

    def done(self, prefill: Hashable, tokens: int, seconds: float) -> None:
        """A transfer of ``tokens`` tokens was committed ``seconds`` after its admission."""
        self._paces.setdefault(prefill, deque(maxlen=self.KEPT)).append(seconds / max(tokens, self.LEAST_TOKENS))

    def pace(self, prefill: Hashable) -> float | None:
        """Seconds per token of the slowest of the last transfers; None if there were none."""
        paces = self._paces.get(prefill)
        return max(paces) if paces else None


@dataclasses.dataclass(eq=False, slots=True)
class Place:
    """A request's place in the line, and after its admission what others may wait for.

    arrival: its number. priority: lower goes first. prefill: who computes its prompt. watch: its prompt in the tree;
    None for a warm-up, which shares nothing. overtaken: requests that came later and were admitted before it.
    """

    arrival: int
    priority: int
    prefill: Hashable
    watch: Watch | None
    overtaken: int = 0
    # Whose transfer it waits for, since when, and how much of its prompt that brings; since when it waits for any.
    leader: Watch | None = None
    since: float = 0.0
    coming: int = 0
    following_since: float | None = None
    # What the tree held of it when it began to follow.
    held_alone: int = 0
    # When it was admitted, and what it asked its prefill for.
    admitted_at: float = 0.0
    lacked: int = 0

    @property
    def waited_s(self) -> float:
        """Seconds for which it has waited for transfers of others; 0 if it never did."""
        return 0.0 if self.following_since is None else time.monotonic() - self.following_since


class Line:
    """The line of requests before admission, and whom of those in transfer they wait for."""

    def __init__(self, tree: DecodeRadixCache, follow: bool, max_overtaken: int):
        """follow: whether requests wait for transfers of others. max_overtaken: see `Candidate.standing`."""
        self.tree = tree
        self.follow = follow
        self.max_overtaken = max_overtaken
        self.patience = Patience()
        self.transfers = Transfers()
        self._arrivals = itertools.count()

    def enter(self, token_ids: Sequence[int] | None, extra_key: str | None, priority: int, prefill: Hashable) -> Place:
        """A request joins the line. token_ids: its prompt, None for a warm-up."""
        watch = None if token_ids is None else self.tree.watches.add(token_ids, extra_key)
        place = Place(next(self._arrivals), priority, prefill, watch)
        if watch is not None:
            watch.owner = place
        return place

    def leave(self, place: Place) -> None:
        """A request is admitted no more, or what it was admitted with is in the tree or lost."""
        if place.watch is not None:
            self.tree.watches.remove(place.watch)
            place.watch = None

    @property
    def may_follow(self) -> bool:
        """Whether there is a transfer under way that somebody could wait for."""
        return self.follow and self.tree.watches.on_the_way > 0

    def stop_following(self, places: Sequence[Place]) -> None:
        """What `look` does with each of ``places`` while nobody may follow."""
        for place in places:
            if place.leader is not None:
                place.leader, place.coming = None, 0

    def look(self, place: Place, now: float) -> int:
        """Whether ``place`` is to wait for a transfer under way: for how many tokens; 0 if it is not."""
        found = self._leader(place)
        if found is None:
            place.leader, place.coming = None, 0
            return 0
        leader, place.coming = found
        if place.leader is not leader:
            place.leader, place.since = leader, now
        lead: Place = leader.owner
        same = lead.prefill == place.prefill
        pace = self.transfers.pace(place.prefill)
        if now - place.since > self.patience.allowed(same, pace, lead.lacked, place.coming):
            place.coming = 0
        elif place.following_since is None and place.watch is not None:
            place.following_since, place.held_alone = now, place.watch.length
        return place.coming

    def look_again(self, place: Place, now: float) -> int:
        """The same later in the step, when another request may have become its leader.

        What has been decided about the leader that it had is not asked anew: the clocks of TP ranks differ.
        """
        found = self._leader(place)
        if found is not None and found[0] is place.leader:
            return place.coming
        return self.look(place, now)

    def _leader(self, place: Place) -> tuple[Watch, int] | None:
        if place.watch is None or not self.may_follow:
            return None
        found = self.tree.watches.leader(place.watch)
        if found is None or not pays_to_follow(found[1], found[0].owner.lacked):
            return None
        return found

    def held(self, place: Place) -> tuple[int, int]:
        """Tokens of a request's prompt that the tree holds, and how many of them no request has locked."""
        if place.watch is None:
            return 0, 0
        return place.watch.length, self.tree.unlocked(place.watch)

    def candidate(self, place: Place, prompt: int) -> Candidate:
        """What decides the place of a request with a prompt of ``prompt`` tokens."""
        held, unlocked = self.held(place)
        return Candidate(place.arrival, place.priority, prompt, held, unlocked, place.coming, place.overtaken)

    def admitted(self, place: Place, lacked: int) -> None:
        """A request was admitted and asks for ``lacked`` tokens: others may follow it from now on."""
        place.admitted_at, place.lacked = time.monotonic(), lacked
        if place.watch is not None:
            self.tree.watches.lead(place.watch)

    def committed(self, place: Place) -> None:
        """What ``place`` asked for has arrived and is in the tree."""
        if place.watch is not None:
            self.transfers.done(place.prefill, place.lacked, time.monotonic() - place.admitted_at)
        self.leave(place)

    def slack(self, waiting: Sequence[Place]) -> int:
        """Requests that may go out of their turn before another of ``waiting`` has been overtaken as often as may be.

        Who has been goes before them, and does not count.
        """
        left = (self.max_overtaken - place.overtaken for place in waiting)
        return min((n for n in left if n > 0), default=len(waiting))

    def passed_by(self, waiting: Sequence[Place], admitted: Sequence[Place]) -> int:
        """``admitted`` have been, ``waiting`` could have been instead and were not. Returns how many were overtaken."""
        arrivals = sorted(place.arrival for place in admitted)
        overtaken = 0
        for place in waiting:
            later = len(arrivals) - bisect_right(arrivals, place.arrival)
            place.overtaken += later
            overtaken += later > 0
        return overtaken
