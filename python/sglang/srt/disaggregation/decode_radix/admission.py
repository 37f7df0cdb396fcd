"""Admission of ready requests in one step, in order: plan, add, allocate memory, ask for the delta.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_radix.adder import Added, DecodeAdder
from sglang.srt.disaggregation.decode_radix.budget import (
    Accounts,
    AdmissionPlan,
    Budget,
    LiveReqs,
    Memory,
)
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_radix.schedule import sources_of
from sglang.srt.mem_cache.prefix_reader import NOTHING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.allocation import RequestMemory
    from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource, Events
    from sglang.srt.disaggregation.decode_radix.overlap_guard import OverlapGuard
    from sglang.srt.disaggregation.decode_radix.schedule import Agreed, Schedule
    from sglang.srt.disaggregation.decode_radix.tp_agreement import Ranks
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Admission", "Blocked", "Held", "all_ready", "waiting"]

# Access to a member of an enumeration takes longer than its use.
READY, ADMITTED = Phase.READY, Phase.ADMITTED
YES, LAST, NO_ROOM, NO_MEMORY, HELD = (
    Added.YES,
    Added.LAST,
    Added.NO_ROOM,
    Added.NO_MEMORY,
    Added.HELD,
)
# Steps of a blocked queue between two searches for aborted requests.
ABORT_INTERVAL = 16


class Blocked(NamedTuple):
    """A request that did not fit: its plan, what was kept for others, and the state then."""

    rid: str
    plan: AdmissionPlan
    kept: Memory
    version: tuple[int, ...]
    free: Memory | None = None


class Held(NamedTuple):
    """A request that a limit throttles. live: see `Limit.held_live`."""

    rid: str
    live: int | None


class Admission:
    """Admits requests of one rank."""

    def __init__(
        self,
        tree: DecodeRadixCache,
        policy: AdmissionPolicy,
        accounts: Accounts,
        memory: RequestMemory,
        deltas: PrefillDeltas,
        events: Events,
        sources: Sequence[DeltaSource] = (),
        ranks: Ranks | None = None,
    ):
        """deltas, sources: bring what the tree lacks. ranks: admit the same; None for one rank."""
        self._several_ranks = ranks is not None and ranks.size > 1
        self._tree, self._policy, self._accounts = tree, policy, accounts
        self.memory, self.deltas, self._events, self._sources = memory, deltas, events, sources
        self._look_every = policy.lines.look_every or ABORT_INTERVAL
        # Last step: the state if no slot or buffer was free; the request blocked; the one
        # throttled.
        self.full: tuple[int, ...] | None = None
        self.blocked: Blocked | None = None
        self.held: Held | None = None

    def has_nothing_new(
        self,
        step: int,
        queue: Sequence[DecodeRequest],
        retracted: Sequence[Req],
        schedule: Schedule,
        budget: Callable[[], Budget],
        live: Callable[[], LiveReqs],
    ) -> bool:
        """Whether to skip a step: all handshakes are done, and the next request does not fit.

        Then only an abort or a lost prefill can change the queue; every few steps look for these.
        All ranks decide alike: same queue, same pool, agreed phases. step: its number.
        retracted: these requests go first. The cost does not depend on prompt lengths.
        """
        if retracted:
            return step % ABORT_INTERVAL != 0
        blocked, held = self.blocked, self.held
        if step % self._look_every == 0 or not queue:
            return False
        rows = min(self.memory.rows.available_size(), self.deltas.room())
        full = rows <= 0 and self.full == schedule.version()
        if (not full and blocked is None and held is None) or not all_ready(queue):
            return False
        if full:
            return True
        if held is not None:
            # It stays so until a request ends, whatever enters the tree.
            if held.live is None:
                return False
            now = live()
            return len(now.running) + len(now.coming) >= held.live
        assert blocked is not None
        if blocked.version != schedule.version():
            return False
        return not self._has_freed(blocked) or not budget().covers(blocked.plan, blocked.kept)

    def _has_freed(self, blocked: Blocked) -> bool:
        """Whether there is more memory than when ``blocked`` was refused in the same state.

        If not, it cannot fit: what running requests lack shrinks at most as much as free memory.
        Always True with a second pool.
        """
        free = blocked.free
        return free is None or self._tree.state.has_pool or self._accounts.free(()).kv > free.kv

    def admit(
        self,
        agreed: Agreed,
        guard: OverlapGuard,
        rows: int,
        live: Callable[[], LiveReqs],
        budget: Callable[[], Budget],
        schedule: Schedule,
    ) -> list[DecodeRequest]:
        """Admit candidates in order until one does not fit. rows: free req_to_token slots."""
        adder = self._adder(agreed.window, min(rows, self.deltas.room()), budget, live)
        was_blocked = self.blocked
        self.full = self.blocked = self.held = None
        admitted: list[DecodeRequest] = []
        for decode_req, may_match in agreed.candidates:
            if decode_req.is_aborted or decode_req.error is not None:
                continue
            req, entry = decode_req.req, decode_req.entry
            if self._sources and not self._several_ranks:
                entry.sources = sources_of(decode_req, self._sources)
            try:
                plan = self._plan(decode_req, entry, may_match, live)
            except Exception as e:
                # Raised on all ranks: their trees are the same.
                decode_req.mark_failed(e)
                continue
            added = adder.add_one(entry, req, plan)
            if added is not YES and added is not LAST:
                self._note_refused(added, req, plan, adder, schedule, guard)
                if added is NO_MEMORY and (was_blocked is None or was_blocked.rid != req.rid):
                    self._events.blocked()
                break
            self.admit_one(decode_req, plan)
            admitted.append(decode_req)
            if added is LAST:
                break
        self.deltas.ask_admitted(guard)
        for held in self._policy.hooks.held:
            held(None if self.held is None else self.held.rid, lambda: len(waiting(agreed.window)))
        return admitted

    def _adder(
        self,
        window: Sequence[DecodeRequest],
        room: int,
        budget: Callable[[], Budget],
        live: Callable[[], LiveReqs],
    ) -> DecodeAdder:
        # Several ranks have agreed on their trees as they were before an eviction.
        evictable = 0 if self._several_ranks else None
        return DecodeAdder(
            room, budget, self._accounts.reserved, evictable, self._policy.hooks.limit, live
        )

    def _note_refused(
        self,
        added: Added,
        req: Req,
        plan: AdmissionPlan,
        adder: DecodeAdder,
        schedule: Schedule,
        guard: OverlapGuard,
    ) -> None:
        """Note why the step ends with ``req``, and in which state."""
        if added is NO_ROOM:
            # A slot that the in-flight batch reads is free in the next step.
            self.full = None if guard.rows else schedule.version()
        elif added is NO_MEMORY:
            self.blocked = Blocked(
                req.rid, plan, adder.promised, schedule.version(), self._accounts.free(())
            )
        elif added is HELD:
            self.held = Held(req.rid, adder.held_live)

    def _plan(
        self,
        decode_req: DecodeRequest,
        entry: QueueEntry,
        may_match: bool,
        live: Callable[[], LiveReqs],
    ) -> AdmissionPlan:
        """What an admission takes. may_match: its prefill and the other ranks allow a prefix."""
        req = decode_req.req
        may_match = may_match and self._tree.accepts(req)
        found = self._policy.find(entry) if may_match else NOTHING
        entry.stored = (
            self._tree.tier.found(entry.host_watch, found.length) if may_match else NOTHING
        )
        held = entry.stored if entry.stored.length else found
        takes = [s for s in entry.sources if s.takes(req, held, live)] if may_match else []
        entry.source = takes[0] if takes else None
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
        self.memory.give(req, req.origin_input_ids, plan)
        if decode_req.load is not None:
            tier.load(decode_req.load, req, self.memory.rows)
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
