"""Admission of ready requests in one step, in order: plan, add, allocate memory, ask for the delta.

`DecodeAdder`, like the engine's ``PrefillAdder``, adds until one does not fit.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, Budget, Memory
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
from sglang.srt.disaggregation.decode_radix.schedule import lets_source
from sglang.srt.mem_cache.prefix_reader import NOTHING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
    from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
    from sglang.srt.disaggregation.decode_radix.hooks import Limit
    from sglang.srt.disaggregation.decode_radix.overlap_guard import OverlapGuard
    from sglang.srt.disaggregation.decode_radix.schedule import Agreed
    from sglang.srt.managers.schedule_batch import Req

# Access to a member of an enumeration takes longer than its use.
READY, ADMITTED = Phase.READY, Phase.ADMITTED
# Steps of a blocked queue between two searches for aborted requests.
ABORT_INTERVAL = 16


class Added(enum.Enum):
    """The result of adding a request."""

    YES = enum.auto()
    # Added; no other request follows in this step.
    LAST = enum.auto()
    # Refused, and the step ends: no req_to_token slot or buffer, too little memory, throttled by a
    # limit, or another request's turn.
    NO_ROOM = enum.auto()
    NO_MEMORY = enum.auto()
    HELD = enum.auto()
    NOT_ITS_TURN = enum.auto()


class DecodeAdder:
    """The admissions of one step, counted by their plans and not by their outcome."""

    def __init__(
        self,
        room: int,
        budget: Callable[[], Budget],
        reserved: int,
        evictable: int | None = None,
        limits: Callable[[], Sequence[Limit]] = tuple,
    ):
        """room: number of requests for which there are a req_to_token slot and a metadata buffer.

        reserved: tokens for a request's next steps. evictable: if the step evicts more tokens, it
        ends; None: no bound. budget, limits: state of the step; called at most once, when a request
        could be admitted.
        """
        self._make_budget, self._make_limits = budget, limits
        self._budget: Budget | None = None
        self._limits: Sequence[Limit] | None = None
        # After `Added.HELD`: see `Limit.held_live`.
        self.held_live: int | None = None
        self._capacity, self._reserved, self._evictable = room, reserved, evictable
        self._entries: list[QueueEntry] = []

    @property
    def promised(self) -> Memory:
        """Memory kept for other requests, at most as `Budget.covers` allows."""
        return Memory(0)

    def add_one(self, entry: QueueEntry, req: Req, plan: AdmissionPlan) -> Added:
        """Add ``req`` if ``plan`` fits. The caller admits it before it adds the next."""
        if len(self._entries) >= self._capacity:
            return Added.NO_ROOM
        if self._budget is None:
            self._budget = self._make_budget()
        budget = self._budget
        if not budget.covers(plan, self.promised):
            return Added.NO_MEMORY
        if self._limits is None:
            self._limits = self._make_limits()
        for limit in self._limits:
            if not limit.add(plan, req, at_once=entry.local):
                self.held_live = limit.held_live()
                return Added.HELD
        if not self._in_turn(entry):
            return Added.NOT_ITS_TURN
        self._entries.append(entry)
        # ``available`` is negative after evictions by earlier admissions.
        evicts = max(0, plan.delta - budget.available)
        budget.admit(plan, self._reserved)
        within = self._evictable is None or evicts <= self._evictable
        return Added.YES if within else Added.LAST

    def _in_turn(self, entry: QueueEntry) -> bool:
        """Whether it is this request's turn; called in the order of admission."""
        return True


class Refused(NamedTuple):
    """The request that ended a step, and why. may_fit: whether it may be admitted now."""

    rid: str
    why: Added
    may_fit: Callable[[], bool]


class Admission:
    """Admits requests of one rank."""

    look_every = ABORT_INTERVAL

    def __init__(self, queue: DecodePreallocQueue, deltas: PrefillDeltas):
        """queue: whose requests it admits. deltas: brings what the tree lacks."""
        self._queue, self.deltas, self._source = queue, deltas, queue.source
        self._several_ranks = queue.ranks.size > 1
        self._tree, self._policy, self._accounts = queue.radix, queue.policy, queue.accounts
        self._schedule = queue.schedule
        self._events = events_of(queue.scheduler.server_args)
        # In the last step.
        self.refused: Refused | None = None

    def has_nothing_new(
        self, step: int, queue: Sequence[DecodeRequest], retracted: Sequence[Req]
    ) -> bool:
        """Whether to skip a step: all handshakes are done, and the next request does not fit.

        Then only an abort or a lost prefill can change the queue; every few steps look for these.
        All ranks decide alike: same queue, same pool, agreed phases. step: its number.
        retracted: these requests go first. The cost does not depend on prompt lengths.
        """
        if retracted:
            return step % ABORT_INTERVAL != 0
        if self.refused is None or step % self.look_every == 0 or not queue:
            return False
        return all_ready(queue) and not self.refused.may_fit()

    @property
    def blocked(self) -> str | None:
        """The request for which the last step had too little memory."""
        refused = self.refused
        return refused.rid if refused is not None and refused.why is Added.NO_MEMORY else None

    def admit(self, agreed: Agreed, guard: OverlapGuard, rows: int) -> list[DecodeRequest]:
        """Admit candidates in order until one does not fit. rows: free req_to_token slots."""
        adder = self._adder(agreed.window, min(rows, self.deltas.room()))
        was_blocked, self.refused = self.blocked, None
        admitted: list[DecodeRequest] = []
        for decode_req, may_match in agreed.candidates:
            if decode_req.is_aborted or decode_req.error is not None:
                continue
            req, entry = decode_req.req, decode_req.entry
            if not self._several_ranks:
                entry.lets_source = lets_source(decode_req, self._source)
            try:
                plan = self._plan(decode_req, entry, may_match)
            except Exception as e:
                # Raised on all ranks: their trees are the same.
                decode_req.mark_failed(e)
                continue
            added = adder.add_one(entry, req, plan)
            if added is not Added.YES and added is not Added.LAST:
                may_fit = self._may_fit(added, plan, adder, guard)
                self.refused = Refused(req.rid, added, may_fit)
                if self.blocked not in (None, was_blocked):
                    self._events.blocked()
                break
            self.admit_one(decode_req, plan)
            admitted.append(decode_req)
            if added is Added.LAST:
                break
        self.deltas.ask_admitted(guard)
        refused = self.refused
        rid = refused.rid if refused is not None and refused.why is Added.HELD else None
        for held in self._policy.hooks.held:
            held(rid, lambda: len(waiting(agreed.window)))
        return admitted

    def _adder(self, window: Sequence[DecodeRequest], room: int) -> DecodeAdder:
        # Several ranks have agreed on their trees as they were before an eviction.
        evictable = 0 if self._several_ranks else None
        return DecodeAdder(room, *self._for_adder(evictable))

    def _for_adder(self, evictable: int | None) -> tuple:
        """The arguments of `DecodeAdder` after the first."""
        return self._queue._budget, self._accounts.reserved, evictable, self._limits

    def _limits(self) -> list[Limit]:
        makers = self._policy.hooks.limit
        live = self._queue.live() if makers else None
        return [limit(live) for limit in makers]

    def _may_fit(
        self, added: Added, plan: AdmissionPlan, adder: DecodeAdder, guard: OverlapGuard
    ) -> Callable[[], bool]:
        """Returns a test: whether what was refused in the present state may be admitted."""
        version, state = self._schedule.version, self._schedule.version()
        # A slot that the in-flight batch reads is free in the next step.
        if added is Added.NO_ROOM and not guard.rows:
            return lambda: self._room() > 0 or version() != state
        if added is Added.NO_MEMORY:
            free, kept = self._accounts.free(()), adder.promised
            return lambda: (
                version() != state
                or (self._accounts.has_freed(free) and self._queue._budget().covers(plan, kept))
            )
        if added is Added.HELD and adder.held_live is not None:
            # It stays so until a request ends, whatever enters the tree.
            live = adder.held_live
            return lambda: self._num_live() < live
        return lambda: True

    def _num_live(self) -> int:
        live = self._queue.live()
        return len(live.running) + len(live.coming)

    def _room(self) -> int:
        return min(self._accounts.rows.available_size(), self.deltas.room())

    def _plan(self, decode_req: DecodeRequest, entry: QueueEntry, may_match: bool) -> AdmissionPlan:
        """What an admission takes. may_match: its prefill and the other ranks allow a prefix."""
        req = decode_req.req
        may_match = may_match and self._tree.accepts(req)
        found = self._policy.find(entry) if may_match else NOTHING
        entry.stored = (
            self._tree.tier.found(entry.host_watch, found.length) if may_match else NOTHING
        )
        held = entry.stored if entry.stored.length else found
        source = self._source if may_match and entry.lets_source else None
        takes = source is not None and source.takes(req, held, self._queue.live)
        entry.source = source if takes else None
        if takes and held.length == len(req.origin_input_ids):
            # A prompt step computes at least one token, and not into a shared page.
            prompt = self._tree.shareable(req.origin_input_ids)[:-1]
            found = self._tree.peek(prompt, req.extra_key)
            if entry.stored.length:
                entry.stored = self._tree.tier.found_of(prompt, req.extra_key, found.length)
        return self._accounts.plan(req, req.origin_input_ids, found)

    def admit_one(self, decode_req: DecodeRequest, plan: AdmissionPlan) -> None:
        """Carry out an admission. Others in the step rely on it: memory errors end the worker."""
        req, entry = decode_req.req, decode_req.entry
        held, tier = plan.found.length, self._tree.tier
        if entry.stored.length:
            # Before anything is allocated.
            decode_req.load = tier.lock(entry.stored, held, req.priority or 0)
        self._accounts.give(req, req.origin_input_ids, plan)
        if decode_req.load is not None:
            tier.load(decode_req.load, req, self._accounts.rows)
            held = decode_req.load.end
        self._policy.admitted(entry, len(req.origin_input_ids) - held)
        decode_req.advance(ADMITTED)
        source = entry.source or self.deltas
        self._events.admitted(decode_req, plan.found.length, held - plan.found.length)
        try:
            source.request(decode_req)
        except Exception as e:
            decode_req.mark_failed(e)


def all_ready(queue: Sequence[DecodeRequest]) -> bool:
    """Whether all handshakes are done."""
    ready = READY
    # No generator: it would take longer, in a queue of hundreds.
    for decode_req in queue:
        if decode_req.phase is not ready:
            return False
    return True


def waiting(window: Sequence[DecodeRequest]) -> list[QueueEntry]:
    """The entries of all requests that could be admitted."""
    return [
        dr.entry for dr in window if dr.phase is READY and dr.error is None and not dr.is_aborted
    ]
