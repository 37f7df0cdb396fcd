"""Which queued requests one admission step looks at, their order, and how the TP ranks agree on it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
from sglang.srt.disaggregation.decode_radix.tp_agreement import CANDIDATES, WINDOW, Agreement
from sglang.srt.mem_cache.decode_radix_cache import is_warmup

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource, Measured

READY = Phase.READY
# Ready requests that each window of a longer queue has. All others take turns in the rest: hundreds
# may wait for one transfer, and failures behind them must be reported.
FIRST = WINDOW // 2
# Rotation per look, in circles: sees all of 260 to 8,000 requests in at most 2.3 times the looks of
# a scan, also if only every 16th step looks. Golden ratio: 10 times, as 16 of it are close to 8/9.
TURN = 6**0.5 - 2


class Window(NamedTuple):
    """The requests that a step looks at, and their entries."""

    requests: Sequence[DecodeRequest]
    entries: list[QueueEntry]


class Agreed(NamedTuple):
    """Input of a step. candidates: in order, each with may_match. window: requests looked at."""

    candidates: Iterable[tuple[DecodeRequest, bool]]
    window: Sequence[DecodeRequest]


def takes_prefix(decode_req: DecodeRequest) -> bool:
    """Whether the request's prefill accepts a decode prefix."""
    return getattr(decode_req.kv_receiver, "peer_takes_prefix", False)


def lets_source(decode_req: DecodeRequest, source: DeltaSource | None) -> bool:
    """Whether the request's prefill lets ``source`` bring the delta."""
    return source is not None and takes_prefix(decode_req) and source.lets(decode_req)


def priority_sign(scheduler: Any) -> int:
    """Factor for priorities so that lower goes first, as in the engine; 0 if they are off."""
    if not getattr(scheduler, "enable_priority_scheduling", False):
        return 0
    return 1 if scheduler.schedule_low_priority_values_first else -1


class Schedule:
    """Orders the requests of one queue by a policy."""

    def __init__(self, queue: DecodePreallocQueue, measured: Sequence[Measured]):
        """measured: further figures that ranks agree on."""
        self._queue, self._measured = queue, measured
        self._policy, self._tree = queue.policy, queue.radix
        # Windows made so far.
        self._windows_made = 0

    def version(self) -> tuple[int, ...]:
        """Changes when a request that did not fit may fit, for other reasons than free memory."""
        tree = self._tree
        return tree.growth, tree.locks_taken, tree.locks_released, self._policy.departures

    def enter(self, decode_req: DecodeRequest) -> None:
        """Add a new request to the policy's queue."""
        req, sign = decode_req.req, priority_sign(self._queue.scheduler)
        priority = sign * req.priority if sign else 0
        prompt = None if is_warmup(req) else req.origin_input_ids
        prefill = getattr(decode_req.kv_receiver, "bootstrap_addr", None)
        try:
            entry = self._policy.enter(prompt, req.extra_key, priority, prefill)
        except Exception as e:
            # Raised on all ranks: their trees are the same.
            decode_req.mark_failed(e)
            entry = self._policy.enter(None, None, priority, prefill)
        decode_req.entry = entry

    # ---- the window ----

    def window(self, queue: Sequence[DecodeRequest]) -> Window:
        """At most `WINDOW` requests, ready ones first. Same on all ranks: phases are agreed on."""
        self._windows_made += 1
        requests = self._first(queue, self._windows_made) if len(queue) > WINDOW else queue
        return Window(requests, [dr.entry for dr in requests])

    def _first(self, queue: Sequence[DecodeRequest], turn: int) -> list[DecodeRequest]:
        ready = self._ready(queue)
        if priority_sign(self._queue.scheduler):
            ready.sort(key=lambda dr: dr.entry.priority)
        # By agreed phases only: the same on all ranks.
        others = [*ready[FIRST:], *(dr for dr in queue if dr.phase is not READY)]
        # Later turns pick others, until each has been picked.
        begin = int(turn * TURN % 1.0 * len(others))
        return [*ready[:FIRST], *others[begin:], *others[:begin]][:WINDOW]

    def _ready(self, queue: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Those of ``queue`` that may be admitted, in order of arrival."""
        return [dr for dr in queue if dr.phase is READY]

    # ---- decisions ----

    def decide(self, window: Window) -> Agreed:
        """What a single rank does in this step, after its polls."""
        requests = window.requests
        for measured in self._measured:
            measured.take(measured.own())
        ready = [requests[i] for i in self._order(window)]
        # Lazy: most of a long queue is behind the first request that does not fit.
        return Agreed(((dr, takes_prefix(dr)) for dr in ready), requests)

    def agree(self, window: Window, polls: Sequence[int]) -> Agreed | None:
        """What several ranks do in this step, agreed on in one collective; None to skip the step.

        Equal figures lead to equal decisions. If queue, pool or order differ, all ranks skip the
        step. A request whose prefix differs between the trees is admitted without one.
        """
        queue, ranks = self._queue, self._queue.ranks
        requests, entries = window
        # Ready requests, then up to `CANDIDATES` those whose handshake may complete in this step.
        order = self._order(window)
        picked, line = self._compared(order, entries)
        late = [i for i, dr in enumerate(requests) if dr.phase is not READY][
            : CANDIDATES - len(picked)
        ]
        available, beside, evictable, rows, *host = queue.accounts.figures()
        buffers = queue.req_to_metadata_buffer_idx_allocator.available_size()
        agreement = ranks.agree(
            # What must be equal for equal decisions.
            [
                len(queue.queue),
                ranks.rooms_digest(entries, lambda: [dr.req.bootstrap_room for dr in requests]),
                available,
                beside,
                evictable,
                len(queue.retracted_queue),
                zlib.crc32(f"{line};{rows};{buffers};{host}".encode()),
            ],
            [self._held(requests[i]) for i in (*picked, *late)],
            polls,
            # The minimum counts for all ranks.
            [takes_prefix(dr) + lets_source(dr, queue.source) for dr in requests],
            [figure for one in self._measured for figure in one.own()],
            self._digest(entries),
        )
        if agreement is None:
            return None
        first = 0
        for measured in self._measured:
            measured.take(agreement.measured[first : first + measured.width])
            first += measured.width
        queue.take_polls(requests, agreement.polls)
        self._learn(entries, agreement)
        same = dict(zip((*picked, *late), agreement.same, strict=True))
        return Agreed(self._candidates(window, agreement, same), requests)

    # ---- for extras to override ----

    def _compared(self, order: list[int], entries: Sequence[QueueEntry]) -> tuple[list[int], str]:
        """Indices of requests whose prefixes ranks compare; and what must be equal of the order."""
        return order[:CANDIDATES], str(order[:CANDIDATES])

    def _digest(self, entries: list[QueueEntry]) -> int:
        """A digest of what else is compared of the trees."""
        return 0

    def _learn(self, entries: Sequence[QueueEntry], told: Agreement) -> None:
        """Note whether all ranks let the other source bring the delta."""
        if self._queue.source is not None:
            for entry, capable in zip(entries, told.capable, strict=True):
                entry.lets_source = capable > 1

    def _candidates(
        self, window: Window, told: Agreement, same: dict[int, bool]
    ) -> list[tuple[DecodeRequest, bool]]:
        """See `Agreed`. same: per index compared, in order, whether the trees hold the same."""
        found = [(i, window.requests[i]) for i in same]
        return [(dr, bool(told.capable[i]) and same[i]) for i, dr in found if dr.phase is READY]

    # ---- figures ----

    def _held(self, decode_req: DecodeRequest) -> tuple[int, int]:
        try:
            return self._figures(decode_req.entry)
        except Exception as e:
            decode_req.mark_failed(e)
            return 0, 0

    def _figures(self, entry: QueueEntry) -> tuple[int, int]:
        """Must be equal on all ranks: tokens in the tree; unlocked ones + (on the host << 32)."""
        held, unlocked = self._policy.held(entry)
        return held, unlocked + (self._policy.on_host(entry) << 32)

    # ---- the order ----

    def _order(self, window: Window) -> list[int]:
        """Indices of ready requests in ``window``, in the order of admission."""
        entries = window.entries
        ready = [i for i, dr in enumerate(window.requests) if dr.phase is READY]
        return sorted(ready, key=lambda i: (entries[i].priority, entries[i].arrival))
