"""Order of admission by cached prefix, and requests that wait for another's transfer.

All figures are tokens unless said otherwise.

* **Order.** First come, first served, except that requests with most of their prompt in the tree, or in transfer to it,
  go first. Each request has a bound of bypasses; at the bound it goes first. Priority comes before all of this. The
  engine's ``lpm`` and ``dfs-weight`` orders are the precedent; they have no bound.
* **Following.** A request whose prompt extends one in transfer (its leader's) waits until that is committed, and then
  needs the rest only. Memory for the rest is kept for it. It waits only if it shares most of the transfer, and not
  longer than its own transfer would take. Of those that have waited so long for one prefill, the first starts its own
  transfer, and the others follow that.

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
    """Admission class within one priority; lower goes first."""

    OVERTAKEN = 0  # its bypasses have reached the bound
    SHARED = 1  # most of its prompt is locked by requests: it needs least memory, and frees its delta at its end
    HELD = 2  # most of its prompt is in the tree or in transfer to it
    OTHER = 3


@dataclasses.dataclass(slots=True)
class Candidate:
    """What decides the order of a queued request after its handshake.

    arrival: its number. priority: lower goes first. prompt: its length. held: in the tree, whole pages. unlocked: of
    these, not locked by a request. coming: beyond ``held``, from the transfer that it waits for or from host memory.
    overtaken: later requests admitted before it.
    """

    arrival: int
    priority: int
    prompt: int
    held: int
    unlocked: int
    coming: int
    overtaken: int

    def standing(self, max_overtaken: int) -> Standing:
        """Its class. ``max_overtaken``: 0 keeps the order of arrival."""
        if self.overtaken >= max_overtaken:
            return Standing.OVERTAKEN
        if 2 * (self.held - self.unlocked) >= self.prompt:
            return Standing.SHARED
        if 2 * (self.held + self.coming) >= self.prompt:
            return Standing.HELD
        return Standing.OTHER


def admission_order(candidates: Sequence[Candidate], max_overtaken: int) -> list[int]:
    """Indices of ``candidates`` in order of admission."""
    keys = [(c.priority, c.standing(max_overtaken), c.arrival) for c in candidates]
    return sorted(range(len(candidates)), key=keys.__getitem__)


def least_to_follow(leader_delta: int) -> int:
    """Tokens of a transfer that a follower must share: half of its ``leader_delta``. Below, it would wait mostly for
    tokens that it cannot use.
    """
    return -(-leader_delta // 2)


class Pace(NamedTuple):
    """The slowest recent transfer of a prefill: most seconds per token, and most seconds in all."""

    seconds_per_token: float
    longest: float


@dataclasses.dataclass(slots=True)
class WaitLimit:
    """Longest wait for another's transfer, seconds.

    A prefill works in order of requests. With the *same* prefill, the follower's own transfer would come after the
    leader's. So it waits twice the slowest recent pace, or a default if none is known; not longer, since the leader's
    transfer may be hung. Another prefill would start at once. Then the wait is bounded by what it saves: the shared
    tokens at that prefill's pace, capped by its longest transfer. The cap matters since a short transfer's time is
    mostly queueing, which a long one has only once.
    """

    # Lower bound; and, for a prefill without recent transfers, 10 s or twice the time at 4,000 tokens/s.
    least: float = 1.0
    unknown_same: float = 10.0
    unknown_seconds_per_token: float = 1 / 2000
    # Cap, as a multiple of the longest recent transfer.
    most_of_longest: float = 4.0

    def allowed(self, same: bool, pace: Pace | None, delta: int, coming: int) -> float:
        """same: whether leader and follower have one prefill. pace: the follower's prefill's.

        delta: tokens that the leader's transfer brings. coming: how many of them the follower shares.
        """
        if pace is None:
            return max(self.unknown_same, self.unknown_seconds_per_token * delta) if same else self.least
        if same:
            return max(self.least, 2 * pace.seconds_per_token * delta)
        return min(pace.seconds_per_token * coming, max(self.least, self.most_of_longest * pace.longest))


class Done(NamedTuple):
    """A committed transfer. at: when, by the monotonic clock."""

    at: float
    seconds_per_token: float
    seconds: float


class Transfers:
    """Recent transfer times of each prefill, from admission to commit."""

    # Transfers kept per prefill.
    KEPT = 32
    # The time of a shorter transfer does not depend on its tokens.
    LEAST_TOKENS = 256
    # Older transfers do not count: the engine's own time-out is as long.
    OLD_S = 300.0
    # Bound of the prefills kept: requests name the addresses.
    PREFILLS = 1024

    def __init__(self) -> None:
        self._done: OrderedDict[Hashable, deque[Done]] = OrderedDict()
        # Incremented when a pace changes: the wait limits then change without a change of the tree.
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
        """Of recent transfers; None without any."""
        since = time.monotonic() - self.OLD_S
        found = [done[1:] for done in self._done.get(prefill, ()) if done.at >= since]
        return Pace(*map(max, zip(*found, strict=True))) if found else None


@dataclasses.dataclass(eq=False, slots=True)
class PrefixEntry(QueueEntry):
    """The policy's entry of a request, also for those that wait for its transfer.

    watch: its prompt in the tree; None for a warm-up, which shares nothing. overtaken: later requests admitted before
    it.
    """

    watch: Watch | None = None
    overtaken: int = 0
    # Whether all TP ranks know that its prefill takes a prefix; otherwise it may not wait for others.
    takes_prefix: bool = False
    # The transfer it waits for, since when, and the tokens it will get from it.
    leader: Watch | None = None
    since: float = 0.0
    coming: int = 0
    # Its cached tokens at ``since``; None: the wait for the next leader starts anew.
    held_since: int | None = None
    # End of the wait for its leader, as long as leaders and `Transfers.changes` stay.
    due: float = -math.inf
    changes: int = -1
    # The last leader that it waited for until the limit.
    given_up: Watch | None = None
    following_since: float | None = None
    # Its cached tokens at ``following_since``, when it first followed a leader.
    held_alone: int = 0
    # The number of its admission.
    admission: int = 0

    @property
    def waited_s(self) -> float:
        """Seconds since it first waited for another's transfer; 0 if it never did."""
        return 0.0 if self.following_since is None else time.monotonic() - self.following_since

    def wait_for(self, leader: Watch, now: float) -> None:
        """Set a new leader. The wait continues from the first leader until one has brought tokens.

        Otherwise a series of lost leaders would make it wait for ever.
        """
        assert self.watch is not None
        if self.held_since is None or self.watch.length > self.held_since:
            self.since, self.held_since = now, self.watch.length
        self.leader = leader

    def give_up(self) -> None:
        """Stop waiting for its leader; a later one is possible, see `may_wait_for`."""
        self.given_up, self.held_since = self.leader or self.given_up, None
        if self.watch is not None:
            self.watch.may = None if self.given_up is None else self.may_wait_for
            self.watch.forget_leaders()

    def may_wait_for(self, leader: Watch) -> bool:
        """Whether it may wait for ``leader`` after it has given one up.

        Only for a later one. One of its own prefill precedes its own transfer anyway. One of another prefill counts
        only once the given-up one has ended; otherwise it would wait twice while its own transfer is due.
        """
        assert self.given_up is not None
        lead, given_up = leader.owner, self.given_up.owner
        later: bool = lead.admission > given_up.admission
        return later and (lead.prefill == self.prefill or given_up.watch is None)

    def follow_nobody(self) -> None:
        """No transfer to wait for was found."""
        self.leader, self.coming = None, 0


class Expired:
    """Requests that have reached their wait limit by rank 0's clock: part of the one reduction.

    One bit for each request of the window, `BITS` to a figure.
    """

    BITS = 32
    width = WINDOW // BITS

    def __init__(self) -> None:
        self._entries: Sequence[PrefixEntry] = ()
        self._expired: Sequence[int] = ()

    def note(self, entries: Sequence[PrefixEntry], expired: Sequence[int]) -> None:
        """entries: of the window. expired: indices of those at their limit by this rank's clock."""
        self._entries, self._expired = entries, expired

    def own(self) -> list[int]:
        words = [0] * self.width
        for i in self._expired:
            words[i // self.BITS] |= 1 << i % self.BITS
        return words

    def take(self, figures: list[int]) -> None:
        """Give up their leaders, from the next step on; this step's order is agreed already."""
        for n, word in enumerate(figures):
            for bit in range(self.BITS) if word else ():
                if word >> bit & 1:
                    self._entries[n * self.BITS + bit].give_up()


class PrefixPolicy(AdmissionPolicy):
    """Order of queued requests, and their leaders among requests in transfer."""

    @classmethod
    def of(cls, server_args: Any, tree: DecodeRadixCache) -> PrefixPolicy:
        by_prefix = server_args.disaggregation_decode_admission == "prefix"
        most = server_args.disaggregation_decode_max_overtaken if by_prefix else 0
        return cls(tree, by_prefix, most)

    def __init__(self, tree: DecodeRadixCache, follow: bool, max_overtaken: int):
        """follow: whether requests wait for others' transfers. max_overtaken: see `Candidate.standing`."""
        super().__init__(tree)
        # `PrefixWatches`, set by the overlay of ``disaggregation/decode.py``.
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
        # Otherwise a chain of followers would keep all entries alive.
        entry.leader = entry.given_up = None
        super().leave(entry)
        if entry.watch is not None:
            self.watches.remove(entry.watch)
            entry.watch = None

    @property
    def may_follow(self) -> bool:
        """Whether a transfer is in flight that a request could wait for."""
        return self.follow and self.watches.on_the_way > 0

    def stop_following(self, entries: Sequence[PrefixEntry]) -> None:
        """`find_leader` for all ``entries`` if no request may follow."""
        for entry in entries:
            if entry.leader is not None:
                entry.follow_nobody()

    def find_leader(self, entry: PrefixEntry, now: float) -> bool:
        """Find the transfer for ``entry`` to wait for; sets `PrefixEntry.coming` to its tokens, 0 if there is none.

        Returns whether it has reached its wait limit by this rank's clock. It waits on until `give_up`: clocks and
        measured paces differ between TP ranks, which have to agree first.
        """
        watch, changes = entry.watch, self.transfers.changes
        if entry.takes_prefix and now <= entry.due and entry.changes == changes:
            if watch is not None and watch.seen == watch.group.newest:
                return False
        found = self._leader(entry)
        # Its prefill's capabilities may arrive later.
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
        """Stop waiting for its leader from this step on; see `PrefixEntry.give_up`."""
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
        """Cost: independent of the prompt's length."""
        if entry.watch is None:
            return 0, 0
        return entry.watch.length, entry.watch.unlocked_tokens()

    def candidate(self, entry: PrefixEntry, prompt: int) -> Candidate:
        """prompt: its length, tokens."""
        held, unlocked = self.held(entry)
        coming = max(entry.coming, self.on_host(entry) - held)
        return Candidate(entry.arrival, entry.priority, prompt, held, unlocked, coming, entry.overtaken)

    def admitted(self, entry: Any, delta: int) -> None:
        """From now on others may wait for its transfer."""
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
        """Out-of-turn admissions left before a request of ``waiting`` reaches its bypass bound.

        Requests at the bound go first anyway and do not count.
        """
        left = (self.max_overtaken - entry.overtaken for entry in waiting)
        return min((n for n in left if n > 0), default=len(waiting))

    def count_overtaken(self, waiting: Sequence[PrefixEntry], admitted: Sequence[PrefixEntry]) -> int:
        """Count for each of ``waiting`` its bypasses by ``admitted``. Returns the number of bypassed requests.

        Within each line only: bypasses between lines do not count.
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
    """Turns of one admission step, separately for each line; see `PrefixPolicy.split`.

    waiting: entries of all requests that could be admitted, also those that the step will not reach: otherwise their
    bypasses would not count, and they could wait for ever.
    """

    def __init__(self, policy: PrefixPolicy, waiting: Sequence[PrefixEntry]):
        self._policy = policy
        self._waiting = waiting
        self._lines = [Line(policy, found) for found in policy.split(waiting)]

    def take(self, entry: PrefixEntry) -> bool:
        """Whether ``entry`` may be admitted next, in or out of turn."""
        return self._lines[self._policy.is_second(entry)].take(entry)

    def end(self, admitted: Sequence[PrefixEntry]) -> int:
        """Count bypasses by ``admitted``. Returns the number of bypassed requests."""
        left = [entry for entry in self._waiting if not entry.admitted_at and not entry.coming]
        overtaken = self._policy.count_overtaken(left, admitted)
        for entry in self._waiting:
            # Its own transfer was due, but another in its group went first: that is a bypass too.
            leader = entry.leader if entry.coming and entry.given_up is not None else None
            if leader is not None and leader.owner in admitted:
                overtaken += self._policy.count_overtaken([entry], [leader.owner])
        return overtaken


class Line:
    """Requests of one line in order of arrival."""

    def __init__(self, policy: PrefixPolicy, waiting: Sequence[PrefixEntry]):
        # Out-of-turn admissions left; and the requests by turn, the next one last.
        self._slack = policy.slack([entry for entry in waiting if not entry.coming])
        self._in_turn = sorted(waiting, key=lambda entry: (-entry.priority, -entry.arrival))

    def take(self, entry: PrefixEntry) -> bool:
        turns = self._in_turn
        # Requests that wait for a transfer are not bypassed; ``entry`` itself stays in the list.
        while turns and (turns[-1].coming or turns[-1].admitted_at):
            turns.pop()
        # An empty list: all others wait for a transfer, or did when they were looked at.
        if not turns or entry is turns[-1]:
            return True
        if self._slack <= 0:
            return False
        self._slack -= 1
        return True
