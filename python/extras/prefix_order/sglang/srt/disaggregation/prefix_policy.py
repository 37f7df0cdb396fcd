"""Who is admitted next, by what the tree holds of prompts, and who waits for the transfer of another.

All figures are tokens unless said otherwise.

* **Order.** First come, first served, except that requests of whose prompt most is in the tree, or on its way there, go
  first. Nobody is overtaken more often than a bound; a request that has reached it goes first. A request never goes
  ahead of one of higher priority. The engine's ``lpm`` and ``dfs-weight`` orders of its aggregated scheduler are the
  precedent; they know no bound.
* **Following.** A request whose prompt extends one that is being transferred waits for that transfer to be committed,
  and then needs only what lies beyond it. What it will need is kept for it meanwhile. It waits only where most of what
  it waits for is of use to it, and no longer than a copy of its own would take. Of those that have waited for so long
  and have one prefill, the first has a copy sent, and the others go on to wait for that.

Upstream: none is known that goes by prefixes or waits for a transfer; sgl-project/sglang#40166 (open) orders by age and
cost.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.mem_cache.prefix_reader import NOTHING, PrefixPeek

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.prefix_watch import Watch

__all__ = [
    "Candidate",
    "Expired",
    "PrefixEntry",
    "PrefixPolicy",
    "WaitLimit",
    "Standing",
    "Transfers",
    "Turns",
    "admission_order",
]


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
    which it waits, or by host memory; 0 if by none. overtaken: requests that came later and were admitted before it.
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


def least_to_follow(leader_delta: int) -> int:
    """How many tokens a transfer of ``leader_delta`` tokens must bring of a prompt that is to wait for it.

    Where it is mostly the leader's own, the wait is for that.
    """
    return -(-leader_delta // 2)


class Pace(NamedTuple):
    """Of the transfers of a prefill of late: the most seconds that one took for a token, and that one took at all."""

    seconds_per_token: float
    longest: float


@dataclasses.dataclass(slots=True)
class WaitLimit:
    """How long a request waits for the transfer of another, seconds.

    A leader's prefill works in the order in which it was asked. A copy that a follower asked of the *same* prefill
    would come after the leader's, so it waits for as long as that may take at the worst, and no longer, since it may
    stand still: twice as long as the slowest transfer of late would take for as many tokens, or as a slow prefill would
    where nothing is known of it. Another prefill would start at once, and the wait is for what the wait saves: the
    transfer, at the pace of that prefill, as far as that tells of so many tokens: what a short one took is mostly its
    turn, which a long one waits for no longer.
    """

    # Of a transfer of any size, and while nothing is known of a prefill yet; of a long one then twice what it takes at
    # 4,000 tokens/s.
    least: float = 1.0
    unknown_same: float = 10.0
    unknown_seconds_per_token: float = 1 / 2000
    # Over the longest transfer of late.
    most_of_longest: float = 4.0

    def allowed(self, same: bool, pace: Pace | None, delta: int, coming: int) -> float:
        """same: whether leader and follower have one prefill. pace: of the follower's.

        delta: tokens that the leader's transfer brings. coming: how many of them the follower shares.
        """
        if pace is None:
            return max(self.unknown_same, self.unknown_seconds_per_token * delta) if same else self.least
        if same:
            return max(self.least, 2 * pace.seconds_per_token * delta)
        return min(pace.seconds_per_token * coming, max(self.least, self.most_of_longest * pace.longest))


class Done(NamedTuple):
    """A transfer that has been committed, and when."""

    at: float
    seconds_per_token: float
    seconds: float


class Transfers:
    """How long the transfers of each prefill took of late, from admission to commit."""

    # Of each prefill.
    KEPT = 32
    # What a transfer of fewer tokens takes is not for its tokens.
    LEAST_TOKENS = 256
    # Older ones say nothing of how long one may take at the worst: the engine gives a transfer up after as long.
    OLD_S = 300.0
    # Prefills whose transfers are remembered; requests name their addresses.
    PREFILLS = 1024

    def __init__(self) -> None:
        self._done: OrderedDict[Hashable, deque[Done]] = OrderedDict()
        # Advanced with what decides, beside the tree, for which transfers requests wait and how long.
        self.changes = 0

    def done(self, prefill: Hashable, tokens: int, seconds: float) -> None:
        """A transfer of ``tokens`` tokens was committed ``seconds`` after its admission."""
        before = self.pace(prefill)
        done = Done(time.monotonic(), seconds / max(tokens, self.LEAST_TOKENS), seconds)
        self._done.setdefault(prefill, deque(maxlen=self.KEPT)).append(done)
        self._done.move_to_end(prefill)
        if len(self._done) > self.PREFILLS:
            self._done.popitem(last=False)
        self.changes += self.pace(prefill) != before

    def pace(self, prefill: Hashable) -> Pace | None:
        """Of the last transfers; None if there were none of late."""
        since = time.monotonic() - self.OLD_S
        found = [done[1:] for done in self._done.get(prefill, ()) if done.at >= since]
        return Pace(*map(max, zip(*found, strict=True))) if found else None


@dataclasses.dataclass(eq=False, slots=True)
class PrefixEntry(QueueEntry):
    """A request's entry with the policy, and after its admission what others may wait for.

    watch: its prompt in the tree; None for a warm-up, which shares nothing. overtaken: requests that came later and
    were admitted before it.
    """

    watch: Watch | None = None
    overtaken: int = 0
    # Whether all TP ranks know its prefill to take a prefix; only then may it wait for others.
    takes_prefix: bool = False
    # Whose transfer it waits for, since when, and how much of its prompt that brings; since when it waits for any.
    leader: Watch | None = None
    since: float = 0.0
    coming: int = 0
    # What the tree held of it then; None where the next leader is waited for from the beginning.
    held_since: int | None = None
    # Until when it waits for its leader if nothing changes: of the leaders, and of what `Transfers.changes` counts.
    due: float = -math.inf
    changes: int = -1
    # The last for which it has waited for long enough.
    given_up: Watch | None = None
    following_since: float | None = None
    # What the tree held of it when it began to follow.
    held_alone: int = 0
    # The number of its admission.
    admission: int = 0

    @property
    def waited_s(self) -> float:
        """Seconds for which it has waited for transfers of others; 0 if it never did."""
        return 0.0 if self.following_since is None else time.monotonic() - self.following_since

    def wait_for(self, leader: Watch, now: float) -> None:
        """Another one is its leader. As long as nothing has come of any, it has waited since the first of them.

        Or it would wait for ever where one after another is lost.
        """
        assert self.watch is not None
        if self.held_since is None or self.watch.length > self.held_since:
            self.since, self.held_since = now, self.watch.length
        self.leader = leader

    def give_up(self) -> None:
        """It waits for its leader no longer; it may for one that comes later, see `may_wait_for`."""
        self.given_up, self.held_since = self.leader or self.given_up, None
        if self.watch is not None:
            self.watch.may = None if self.given_up is None else self.may_wait_for
            self.watch.forget_leaders()

    def may_wait_for(self, leader: Watch) -> bool:
        """Whether it may wait for ``leader``, after all for which it has waited for long enough.

        A later one of its own prefill is what its own copy would come after. One of another prefill it would wait for
        once more as long, while a copy of its own is due.
        """
        assert self.given_up is not None
        lead, given_up = leader.owner, self.given_up.owner
        later: bool = lead.admission > given_up.admission
        return later and (lead.prefill == self.prefill or given_up.watch is None)

    def follow_nobody(self) -> None:
        """There is no transfer for which it waits, as far as it has been looked at."""
        self.leader, self.coming = None, 0


class Expired:
    """Who by the first rank's clock has waited long enough for what it waits for: part of the one reduction.

    Of the requests of the window, so many stand in one figure, a bit each.
    """

    BITS = 32
    width = WINDOW // BITS

    def __init__(self) -> None:
        self._entries: Sequence[PrefixEntry] = ()
        self._expired: Sequence[int] = ()

    def note(self, entries: Sequence[PrefixEntry], expired: Sequence[int]) -> None:
        """The entries of the window, and the indices of those that have by this rank's clock."""
        self._entries, self._expired = entries, expired

    def own(self) -> list[int]:
        words = [0] * self.width
        for i in self._expired:
            words[i // self.BITS] |= 1 << i % self.BITS
        return words

    def take(self, figures: list[int]) -> None:
        """They wait no longer, from the next step on; the order of this one is agreed."""
        for n, word in enumerate(figures):
            for bit in range(self.BITS) if word else ():
                if word >> bit & 1:
                    self._entries[n * self.BITS + bit].give_up()


class PrefixPolicy(AdmissionPolicy):
    """The order of requests before admission, and whom of those in transfer they wait for."""

    @classmethod
    def of(cls, server_args: Any, tree: DecodeRadixCache) -> PrefixPolicy:
        by_prefix = server_args.disaggregation_decode_admission == "prefix"
        most = server_args.disaggregation_decode_max_overtaken if by_prefix else 0
        return cls(tree, by_prefix, most)

    def __init__(self, tree: DecodeRadixCache, follow: bool, max_overtaken: int):
        """follow: whether requests wait for transfers of others. max_overtaken: see `Candidate.standing`."""
        super().__init__(tree)
        # `PrefixWatches`, by the overlay of ``disaggregation/decode.py``.
        self.watches: Any = tree.watches
        self.follow = follow
        self.max_overtaken = max_overtaken
        self.wait_limit = WaitLimit()
        self.transfers = Transfers()
        self.expired = Expired()
        self._admissions = itertools.count(1)

    def _entry(
        self, token_ids: Sequence[int] | None, extra_key: str | None, priority: int, prefill: Hashable
    ) -> PrefixEntry:
        watch = None if token_ids is None else self.watches.add(token_ids, extra_key)
        keys = None if watch is None else watch.token_ids
        entry = PrefixEntry(next(self._arrivals), priority, prefill, keys, extra_key, watch=watch)
        if watch is not None:
            watch.owner = entry
        return entry

    def leave(self, entry: Any) -> None:
        # Or each in a chain of followers would keep all before it.
        entry.leader = entry.given_up = None
        super().leave(entry)
        if entry.watch is not None:
            self.watches.remove(entry.watch)
            entry.watch = None

    @property
    def may_follow(self) -> bool:
        """Whether there is a transfer under way that somebody could wait for."""
        return self.follow and self.watches.on_the_way > 0

    def stop_following(self, entries: Sequence[PrefixEntry]) -> None:
        """What `find_leader` does with each of ``entries`` while nobody may follow."""
        for entry in entries:
            if entry.leader is not None:
                entry.follow_nobody()

    def find_leader(self, entry: PrefixEntry, now: float) -> bool:
        """Find the transfer under way for which ``entry`` is to wait: `PrefixEntry.coming` is what it brings, or 0.

        Returns whether by this rank's clock it has waited long enough. It waits on until `give_up`: the clocks of TP
        ranks differ, and what each measures of a prefill, so that is agreed on first.
        """
        watch, changes = entry.watch, self.transfers.changes
        if entry.takes_prefix and now <= entry.due and entry.changes == changes:
            if watch is not None and watch.seen == watch.group.newest:
                return False
        found = self._leader(entry)
        # A prefill may turn out to take a prefix.
        entry.changes, entry.due = changes, math.inf if entry.takes_prefix else -math.inf
        if found is None:
            entry.follow_nobody()
            return False
        leader, coming = found
        if entry.leader is not leader:
            entry.wait_for(leader, now)
        entry.coming = coming
        if entry.following_since is None and watch is not None:
            entry.following_since, entry.held_alone = now, watch.length
        lead: PrefixEntry = leader.owner
        same, pace = lead.prefill == entry.prefill, self.transfers.pace(entry.prefill)
        entry.due = entry.since + self.wait_limit.allowed(same, pace, lead.delta, coming)
        return now > entry.due

    def give_up(self, entry: PrefixEntry) -> None:
        """Have ``entry`` wait for its leader no longer, from this step on; see `PrefixEntry.give_up`."""
        entry.give_up()
        entry.coming = 0

    def _leader(self, entry: PrefixEntry) -> tuple[Watch, int] | None:
        if entry.watch is None or not entry.takes_prefix or not self.may_follow:
            return None
        found = self.watches.leader(entry.watch)
        if found is None or not all(keeps(found[0].owner) for keeps in self.hooks.keeps):
            return None
        return found

    def find(self, entry: Any) -> PrefixPeek:
        """Cost: the depth of the node where its match ends."""
        return NOTHING if entry.watch is None else entry.watch.peek()

    def held(self, entry: Any) -> tuple[int, int]:
        """Cost: none that grows with the prompt."""
        if entry.watch is None:
            return 0, 0
        return entry.watch.length, entry.watch.unlocked_tokens()

    def candidate(self, entry: PrefixEntry, prompt: int) -> Candidate:
        """What decides the place of a request with a prompt of ``prompt`` tokens."""
        held, unlocked = self.held(entry)
        coming = max(entry.coming, self.on_host(entry) - held)
        return Candidate(entry.arrival, entry.priority, prompt, held, unlocked, coming, entry.overtaken)

    def admitted(self, entry: Any, delta: int) -> None:
        """Others may follow it from now on."""
        entry.admission = next(self._admissions)
        super().admitted(entry, delta)
        if entry.watch is not None:
            self.watches.lead(entry.watch, least_to_follow(delta))

    def committed(self, entry: Any) -> None:
        if entry.watch is not None and not entry.local:
            self.transfers.done(entry.prefill, entry.delta, time.monotonic() - entry.admitted_at)
        super().committed(entry)

    def split(self, entries: Sequence[PrefixEntry]) -> tuple[Sequence[PrefixEntry], Sequence[PrefixEntry]]:
        """Two lines, of which the first passes the second; here all are in the first."""
        return entries, ()

    def is_second(self, entry: PrefixEntry) -> bool:
        """Whether it is in the second line."""
        return False

    def slack(self, waiting: Sequence[PrefixEntry]) -> int:
        """Requests that may go out of their turn before another of ``waiting`` has been overtaken as often as may be.

        One that has been overtaken as often goes first anyway, and does not count.
        """
        left = (self.max_overtaken - entry.overtaken for entry in waiting)
        return min((n for n in left if n > 0), default=len(waiting))

    def count_overtaken(self, waiting: Sequence[PrefixEntry], admitted: Sequence[PrefixEntry]) -> int:
        """Count, for each of ``waiting``, who of ``admitted`` overtook it. Returns how many were overtaken.

        Each in its line: that those in the first pass the others is not counted.
        """
        overtaken = 0
        for left, passed in zip(self.split(waiting), self.split(admitted), strict=True):
            arrivals = sorted(entry.arrival for entry in passed)
            for entry in left:
                later = len(arrivals) - bisect_right(arrivals, entry.arrival)
                entry.overtaken += later
                overtaken += later > 0
        return overtaken


class Turns:
    """The turns of one step of admission, in each line by itself; see `PrefixPolicy.split`.

    waiting: the entries of all that could be admitted in it, also of those that come too late in the order to be looked
    at. Whoever is left out of this is overtaken and never counted, and with that for ever.
    """

    def __init__(self, policy: PrefixPolicy, waiting: Sequence[PrefixEntry]):
        self._policy = policy
        self._waiting = waiting
        self._lines = [Line(policy, found) for found in policy.split(waiting)]

    def take(self, entry: PrefixEntry) -> bool:
        """Whether ``entry`` may be admitted next, in its turn or out of it."""
        return self._lines[self._policy.is_second(entry)].take(entry)

    def end(self, admitted: Sequence[PrefixEntry]) -> int:
        """These have been admitted. Returns how many others were overtaken."""
        left = [entry for entry in self._waiting if not entry.admitted_at and not entry.coming]
        overtaken = self._policy.count_overtaken(left, admitted)
        for entry in self._waiting:
            # A copy of its own was due, and it waits for that of another, always if it is the last of them.
            leader = entry.leader if entry.coming and entry.given_up is not None else None
            if leader is not None and leader.owner in admitted:
                overtaken += self._policy.count_overtaken([entry], [leader.owner])
        return overtaken


class Line:
    """Those of ``waiting`` whose turn comes one after another."""

    def __init__(self, policy: PrefixPolicy, waiting: Sequence[PrefixEntry]):
        # How many may still go out of their turn; and those whose turn it is, the next one last.
        self._slack = policy.slack([entry for entry in waiting if not entry.coming])
        self._in_turn = sorted(waiting, key=lambda entry: (-entry.priority, -entry.arrival))

    def take(self, entry: PrefixEntry) -> bool:
        """See `Turns.take`."""
        turns = self._in_turn
        # Who waits for a transfer is not passed by; this request itself stays.
        while turns and (turns[-1].coming or turns[-1].admitted_at):
            turns.pop()
        # None are left: there are no others, or all wait for a transfer, or did when they were looked at.
        if not turns or entry is turns[-1]:
            return True
        if self._slack <= 0:
            return False
        self._slack -= 1
        return True
