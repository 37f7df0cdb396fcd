"""Which requests of the queue one step of admission looks at, in which order, and what the TP ranks
agree on of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_radix.tp_agreement import (
    CANDIDATES,
    WINDOW,
    Agreement,
    Ranks,
    RankState,
)
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource, Measured
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = [
    "Agreed",
    "OwnFigures",
    "Schedule",
    "Window",
    "priority_sign",
    "sources_of",
    "takes_prefix",
]

READY = Phase.READY
# Places of the window that go by turns where the queue is longer than it: to those whose handshake
# is not done, and to those behind the first whose is. Hundreds before them may wait for one
# transfer, and who fails is to be told.
HANDSHAKES = WINDOW // 4
BEHIND = WINDOW // 4
# Turns by this part of a circle look at all of a queue in at most 2.3 times as many looks as one
# after another would, whether each step looks or every sixteenth (all of 260 to 8,000 requests).
# With the golden ratio, of which 16 times is close to 8/9, it was 10 times.
TURN = 6**0.5 - 2


class Window(NamedTuple):
    """The requests that a step looks at, and of each its entry."""

    requests: Sequence[DecodeRequest]
    entries: list[QueueEntry]


class Agreed(NamedTuple):
    """What a step of admission works on.

    candidates: in order, each with whether it may match. window: all that the step looks at,
    candidates or not.
    """

    candidates: Iterable[tuple[DecodeRequest, bool]]
    window: Sequence[DecodeRequest]


class OwnFigures(NamedTuple):
    """Figures of this rank that the others must have too: lengths of two queues,
    `RequestMemory.figures`, buffers.
    """

    queued: int
    retracted: int
    memory: Sequence[int]
    buffers: int


def takes_prefix(decode_req: DecodeRequest) -> bool:
    """Whether a prefix may be named to the prefill of a request."""
    return getattr(decode_req.kv_receiver, "peer_takes_prefix", False)


def sources_of(decode_req: DecodeRequest, sources: Sequence[DeltaSource]) -> Sequence[DeltaSource]:
    """Those of ``sources`` that may bring the delta of a request: all of them or none."""
    return (
        sources
        if takes_prefix(decode_req) and all(source.lets(decode_req) for source in sources)
        else ()
    )


def priority_sign(scheduler: Any) -> int:
    """What priorities are multiplied with so that lower goes first, as in the engine's order; 0:
    they do not count.
    """
    if not getattr(scheduler, "enable_priority_scheduling", False):
        return 0
    return 1 if scheduler.schedule_low_priority_values_first else -1


def _turn(requests: Sequence[DecodeRequest], places: int, turn: int) -> list[DecodeRequest]:
    """``places`` of ``requests``; in the turns that follow others, until it has been
    everybody's.
    """
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
        """priority_sign: what priorities are multiplied with so that lower goes first; 0 where they
        do not count.

        sources: of deltas, beside prefill. measured: what ranks agree on beside the rest.
        """
        self._measured = tuple(measured)
        self._width = sum(one.width for one in self._measured)
        self._policy, self._tree, self._priority_sign = policy, tree, priority_sign
        self._sources = sources
        # Windows that have been found.
        self._looks = 0

    def version(self) -> tuple[int, ...]:
        """What must have changed for a request that did not fit to fit now, other than free
        memory.
        """
        tree = self._tree
        return tree.growth, tree.locks_taken, tree.locks_released, self._policy.departures

    def entry_of(self, decode_req: DecodeRequest) -> QueueEntry:
        """The entry of a request with the policy, whose queue it joins when it is first asked
        for.
        """
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
        """The requests that this step looks at, at most `WINDOW`; of a longer queue those that are
        ready go first.

        All ranks find the same: they have agreed on whose handshake is done, and look in the same
        steps.
        """
        # They stand as they came.
        self._policy.lines.begin_step(self.entry_of(queue[0]) if queue else None)
        self._looks += 1
        requests = self._first(queue, self._looks) if len(queue) > WINDOW else queue
        entry_of = self.entry_of
        return Window(requests, [dr.entry or entry_of(dr) for dr in requests])

    def _first(self, queue: Sequence[DecodeRequest], turn: int) -> list[DecodeRequest]:
        ready = self._policy.lines.looked_at(
            [dr for dr in queue if dr.phase is READY], self.entry_of
        )
        if self._priority_sign():
            ready.sort(key=lambda dr: self.entry_of(dr).priority)
        most = WINDOW - HANDSHAKES
        first = ready if len(ready) <= most else ready[: most - BEHIND]
        # Of what ranks have agreed on only.
        behind = _turn(ready[len(first) :], BEHIND, turn)
        others = [dr for dr in queue if dr.phase is not READY]
        return [*first, *behind, *_turn(others, WINDOW - len(first) - len(behind), turn)]

    # ---- what is decided, by one rank or by several ----

    def decide(self, window: Window) -> Agreed:
        """What a single rank goes on to do, when it has taken in what has been polled."""
        requests = window.requests
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

        Equal figures on all ranks mean that all go on to the same decisions. Ranks whose queue,
        pool or order differ skip the step. A request of which their trees hold different prefixes
        goes without one.

        take_polls: takes in what all have polled.
        """
        requests, entries = window
        # Those whose handshake is done, and as far as there is room those that may turn out to be
        # in this step.
        order = self._order(window)
        picked, line = self._compared(order, entries)
        late = [i for i, dr in enumerate(requests) if dr.phase is not READY][
            : CANDIDATES - len(picked)
        ]
        state = RankState(own.queued, own.retracted, own.memory, own.buffers, line)
        told = ranks.agree(
            state.figures(
                ranks.rooms_digest(entries, lambda: [dr.req.bootstrap_room for dr in requests])
            ),
            [self._held(requests[i]) for i in (*picked, *late)],
            polls,
            # What is less on one rank is so for all.
            [takes_prefix(dr) + bool(sources_of(dr, self._sources)) for dr in requests],
            self._measured_here(),
            self._digest(entries),
        )
        if told is None:
            return None
        first = 0
        for one in self._measured:
            one.take(told.measured[first : first + one.width])
            first += one.width
        take_polls(told.polls)
        self._learn(entries, told)
        same = dict(zip((*picked, *late), told.same, strict=True))
        return Agreed(self._candidates(window, told, same), requests)

    # ---- of which an extra may say something else ----

    def _compared(self, order: list[int], entries: Sequence[QueueEntry]) -> tuple[list[int], str]:
        """Indices of those of which ranks compare what their trees hold, and what must be the same
        of the order.
        """
        return order[:CANDIDATES], str(order[:CANDIDATES])

    def _digest(self, entries: list[QueueEntry]) -> int:
        """What else is compared of the trees."""
        return 0

    def _learn(self, entries: Sequence[QueueEntry], told: Agreement) -> None:
        """Take in what ranks know of prefills."""
        if self._sources:
            for entry, capable in zip(entries, told.capable, strict=True):
                entry.sources = self._sources if capable > 1 else ()

    def _candidates(
        self, window: Window, told: Agreement, same: dict[int, bool]
    ) -> list[tuple[DecodeRequest, bool]]:
        """See `Agreed`. same: of those that were compared, in order, whether the trees hold the
        same of them.
        """
        found = [(i, window.requests[i]) for i in same]
        return [(dr, bool(told.capable[i]) and same[i]) for i, dr in found if dr.phase is READY]

    # ---- figures ----

    def _measured_here(self) -> list[int]:
        """The figures of this rank. Raises ValueError for another number: ranks would reduce
        tensors of two sizes.
        """
        figures = [figure for one in self._measured for figure in one.own()]
        if len(figures) != self._width:
            raise ValueError(
                f"{len(figures)} measured figures to agree on, and {self._width} are agreed on"
            )
        return figures

    def _held(self, decode_req: DecodeRequest) -> tuple[int, int]:
        try:
            return self._figures(self.entry_of(decode_req))
        except Exception as e:
            decode_req.lose(e)
            return 0, 0

    def _figures(self, entry: QueueEntry) -> tuple[int, int]:
        """What the trees of all ranks must hold alike of a request: tokens, and of these unlocked
        or in host memory.
        """
        held, unlocked = self._policy.held(entry)
        return held, unlocked + (self._policy.on_host(entry) << 32)

    # ---- the order ----

    def _order(self, window: Window) -> list[int]:
        """Indices of the requests of ``window`` whose handshake is done, in the order of
        admission.
        """
        entries = window.entries
        ready = [i for i, dr in enumerate(window.requests) if dr.phase is READY]
        return self._policy.lines.mix(self._policy.order(ready, entries), entries)
