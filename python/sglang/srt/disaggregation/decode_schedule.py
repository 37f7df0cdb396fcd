"""Which requests of the queue one step of admission looks at, in which order, and what the TP ranks agree on of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.decode_admission import AdmissionPolicy, Candidate, QueueEntry, admission_order
from sglang.srt.disaggregation.decode_agreement import CANDIDATES, WINDOW, Ranks, RankState
from sglang.srt.disaggregation.request_phase import Phase
from sglang.srt.mem_cache.decode_radix_cache import is_warmup
from sglang.srt.mem_cache.tier import NO_TIER

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource, Measured
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Agreed", "OwnFigures", "Schedule", "Window", "priority_sign", "sources_of", "takes_prefix"]

READY = Phase.READY
# Places of the window that go by turns where the queue is longer than it: to those whose handshake is not done, and to
# those behind the first whose is. Hundreds before them may wait for one transfer, and who fails is to be told.
HANDSHAKES = WINDOW // 4
BEHIND = WINDOW // 4
# Turns by this part of a circle look at all of a queue in at most 2.3 times as many looks as one after another would,
# whether each step looks or every sixteenth (all of 260 to 8,000 requests). With the golden ratio, of which 16 times is
# close to 8/9, it was 10 times.
TURN = 6**0.5 - 2


class Window(NamedTuple):
    """The requests that a step looks at, and of each its entry."""

    requests: Sequence[DecodeRequest]
    entries: list[QueueEntry]


class Agreed(NamedTuple):
    """What a step of admission works on.

    candidates: in order, each with whether it may match. window: all that the step looks at, candidates or not. alike:
    whether the trees of all ranks hold the same of all; if not, others may be candidates in the next step.
    """

    candidates: Iterable[tuple[DecodeRequest, bool]]
    window: Sequence[DecodeRequest]
    alike: bool = True


class OwnFigures(NamedTuple):
    """Figures of this rank that the others must have too: lengths of two queues, `RequestMemory.figures`, buffers."""

    queued: int
    retracted: int
    memory: Sequence[int]
    buffers: int


def takes_prefix(decode_req: DecodeRequest) -> bool:
    """Whether a prefix may be named to the prefill of a request."""
    return getattr(decode_req.kv_receiver, "peer_takes_prefix", False)


def sources_of(decode_req: DecodeRequest, sources: Sequence[DeltaSource]) -> Sequence[DeltaSource]:
    """Those of ``sources`` that may bring the delta of a request: all of them or none."""
    return sources if takes_prefix(decode_req) and all(source.lets(decode_req) for source in sources) else ()


def priority_sign(scheduler: Any) -> int:
    """What priorities are multiplied with so that lower goes first, as in the engine's order; 0: they do not count."""
    if not getattr(scheduler, "enable_priority_scheduling", False):
        return 0
    return 1 if scheduler.schedule_low_priority_values_first else -1


def _turn(requests: Sequence[DecodeRequest], places: int, turn: int) -> list[DecodeRequest]:
    """``places`` of ``requests``; in the turns that follow others, until it has been everybody's."""
    if len(requests) <= places:
        return [*requests]
    first = int(turn * TURN % 1.0 * len(requests))
    return [*requests[first:], *requests[:first]][:places]


class Schedule:
    """Puts the requests of one queue in the order of a policy."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        tree: DecodeRadixCache,
        priority_sign: Callable[[], int],
        sources: Sequence[DeltaSource] = (),
        measured: Sequence[Measured] = (),
    ):
        """priority_sign: what priorities are multiplied with so that lower goes first; 0 where they do not count.

        sources: of deltas, beside prefill. measured: what ranks agree on beside the rest.
        """
        self._measured = tuple(measured)
        self._width = sum(one.width for one in self._measured)
        self._policy, self._tree, self._priority_sign = policy, tree, priority_sign
        self._sources = sources
        # The last order of admission, and the state in which it was found.
        self._ordered: tuple[tuple, list[int]] | None = None
        # What the tree held of a window, by rank, and the state in which it did.
        self._digested: tuple[tuple, int] = ((), 0)
        # Windows that have been found.
        self._looks = 0

    def version(self) -> tuple[int, ...]:
        """What must have changed for a request that did not fit to fit now, other than free memory."""
        tree = self._tree
        return tree.growth, tree.locks_taken, tree.locks_released, tree.watches.leader_version, self._policy.departures

    def entry_of(self, decode_req: DecodeRequest) -> QueueEntry:
        """The entry of a request with the policy, whose queue it joins when it is first asked for."""
        if decode_req.entry is not None:
            return decode_req.entry
        req, sign = decode_req.req, self._priority_sign()
        priority = sign * req.priority if sign else 0
        prompt = None if is_warmup(req) else req.origin_input_ids
        prefill = getattr(decode_req.kv_receiver, "bootstrap_addr", None)
        try:
            entry = self._policy.enter(prompt, req.extra_key, priority, prefill)
        except Exception as e:
            # On all ranks: they ask the same of the same tree.
            decode_req.lose(e)
            entry = self._policy.enter(None, None, priority, prefill)
        return decode_req.enter(entry)

    # ---- the window ----

    def window(self, queue: Sequence[DecodeRequest]) -> Window:
        """The requests that this step looks at, at most `WINDOW`; of a longer queue those that are ready go first.

        All ranks find the same: they have agreed on whose handshake is done, and look in the same steps.
        """
        # They stand as they came.
        self._policy.lines.begin_step(self.entry_of(queue[0]) if queue else None)
        self._looks += 1
        requests = self._first(queue, self._looks) if len(queue) > WINDOW else queue
        entry_of = self.entry_of
        return Window(requests, [dr.entry or entry_of(dr) for dr in requests])

    def _first(self, queue: Sequence[DecodeRequest], turn: int) -> list[DecodeRequest]:
        ready = self._policy.lines.looked_at([dr for dr in queue if dr.phase is READY], self.entry_of)
        if self._priority_sign():
            ready.sort(key=lambda dr: self.entry_of(dr).priority)
        most = WINDOW - HANDSHAKES
        first = ready if len(ready) <= most else ready[: most - BEHIND]
        # Of what ranks have agreed on only: what a request waits for, they may see differently for some steps.
        behind = _turn(ready[len(first) :], BEHIND, turn)
        others = [dr for dr in queue if dr.phase is not READY]
        return [*first, *behind, *_turn(others, WINDOW - len(first) - len(behind), turn)]

    # ---- what is decided, by one rank or by several ----

    def decide(self, window: Window) -> Agreed:
        """What a single rank goes on to do, when it has taken in what has been polled."""
        requests, entries = window
        for i in self._follow(window, alone=True):
            self._policy.give_up(entries[i])
        for one in self._measured:
            one.take(one.own())
        self._policy.lines.measured_alone()
        ready = [requests[i] for i in self._order(window)]
        # Asked one by one: most of a long queue stands behind the first that does not fit.
        return Agreed(((dr, takes_prefix(dr)) for dr in ready), requests)

    def agree(
        self,
        window: Window,
        polls: Sequence[int],
        ranks: Ranks,
        own: OwnFigures,
        take_polls: Callable[[Sequence[int]], None],
    ) -> Agreed | None:
        """What several ranks go on to do, agreed on in one collective; None to skip the step.

        Equal figures on all ranks mean that all go on to the same decisions. Ranks whose queue, pool or order differ
        skip the step. A request of which their trees hold different prefixes goes without one.

        take_polls: takes in what all have polled.
        """
        requests, entries = window
        policy = self._policy
        # Those whose handshake is done, and as far as there is room those that may turn out to be in this step.
        expired = self._follow(window, alone=False)
        order = self._order(window)
        picked = list(islice((i for i in order if not entries[i].coming), CANDIDATES))
        late = [i for i, dr in enumerate(requests) if dr.phase is not READY][: CANDIDATES - len(picked)]
        chosen = set(picked)
        order = [i for i in order if i in chosen or entries[i].coming]
        picked += late
        told = ranks.agree(
            self._state(own, window, order).figures(self._rooms_digest(ranks, window)),
            [self._held(entries[i]) for i in picked],
            polls,
            # What is less on one rank is so for all.
            [takes_prefix(dr) + bool(sources_of(dr, self._sources)) for dr in requests],
            expired,
            self._measured_here(),
            self._held_digest(entries),
        )
        if told is None:
            return None
        first = 0
        for one in self._measured:
            one.take(told.measured[first : first + one.width])
            first += one.width
        take_polls(told.polls)
        if policy.may_follow:
            for entry, capable in zip(entries, told.capable, strict=True):
                entry.takes_prefix = bool(capable)
        if self._sources:
            for entry, capable in zip(entries, told.capable, strict=True):
                entry.sources = self._sources if capable > 1 else ()
        for i in told.expired:
            # From the next step on; the order of this one is agreed.
            entries[i].give_up()
        if told.alike:
            # As one rank alone.
            return Agreed([(requests[i], bool(told.capable[i])) for i in self._order(window)], requests)
        same = dict(zip(picked, told.same, strict=True))
        going = [i for i in (*order, *late) if i in same and requests[i].phase is READY]
        return Agreed([(requests[i], bool(told.capable[i]) and same[i]) for i in going], requests, alike=False)

    def _measured_here(self) -> list[int]:
        """The figures of this rank. Raises ValueError for another number: ranks would reduce tensors of two sizes."""
        figures = [figure for one in self._measured for figure in one.own()]
        if len(figures) != self._width:
            raise ValueError(f"{len(figures)} measured figures to agree on, and {self._width} are agreed on")
        return figures

    def _held_digest(self, entries: list[QueueEntry]) -> int:
        """Of what this rank's tree and host memory hold of all of a window, see `_held`."""
        tree = self._tree
        seen = self.version(), tree.evictable_size(), tree.protected_size(), entries
        if self._digested[0] != seen or tree.tier is not NO_TIER:
            held = array("q", [figure for entry in entries for figure in self._held(entry)])
            self._digested = seen, zlib.crc32(held.tobytes())
        return self._digested[1]

    def _held(self, entry: QueueEntry) -> tuple[int, int]:
        """What the trees of all ranks must hold alike of a request: tokens, and of these unlocked or in host memory."""
        held, unlocked = self._policy.held(entry)
        return held, unlocked + (self._policy.on_host(entry) << 32)

    def _state(self, own: OwnFigures, window: Window, order: Sequence[int]) -> RankState:
        line = [(i, window.entries[i].coming) for i in order]
        return RankState(own.queued, own.retracted, own.memory, own.buffers, line, self._tree.watches.leader_version)

    @staticmethod
    def _rooms_digest(ranks: Ranks, window: Window) -> int:
        return ranks.rooms_digest(window.entries, lambda: [dr.req.bootstrap_room for dr in window.requests])

    def _follow(self, window: Window, alone: bool) -> list[int]:
        """Find out for each request that is ready whether it waits for the transfer of another.

        alone: whether there is one rank, which need not be agreed with on whose prefill takes a prefix. Returns the
        indices of those that by this rank's clock have waited long enough.
        """
        policy = self._policy
        if not policy.may_follow:
            policy.stop_following(window.entries)
            return []
        now, expired = time.monotonic(), []
        for i, decode_req in enumerate(window.requests):
            if decode_req.phase is not READY:
                continue
            entry = window.entries[i]
            if alone:
                entry.takes_prefix = takes_prefix(decode_req)
            try:
                if policy.find_leader(entry, now):
                    expired.append(i)
            except Exception as e:
                decode_req.lose(e)
        return expired

    # ---- the order ----

    def _order(self, window: Window) -> list[int]:
        """Indices of the requests of ``window`` whose handshake is done, in the order of admission."""
        requests, entries = window
        ready = [i for i, dr in enumerate(requests) if dr.phase is READY]
        if len(ready) < 2:
            return ready
        # The same requests, of which the same wait for others, and the same tree: the same order.
        tree = self._tree
        coming = [entries[i].coming for i in ready] if self._policy.may_follow else []
        lines = self._policy.lines
        sizes = tree.evictable_size(), tree.protected_size()
        seen: tuple[Any, ...] = (self.version(), *sizes, ready, coming, lines.version(), entries)
        if self._ordered is None or self._ordered[0] != seen:
            candidates = [self._candidate(requests[i], entries[i]) for i in ready]
            order = [ready[n] for n in admission_order(candidates, self._policy.max_overtaken)]
            self._ordered = seen, lines.mix(order, entries)
        return self._ordered[1]

    def _candidate(self, decode_req: DecodeRequest, entry: QueueEntry) -> Candidate:
        try:
            return self._policy.candidate(entry, len(decode_req.req.origin_input_ids))
        except Exception as e:
            decode_req.lose(e)
            return Candidate(entry.arrival, entry.priority, 0, 0, 0, 0, entry.overtaken)
