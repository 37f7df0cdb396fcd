"""Admission of one step: plan, add, give memory, ask for the delta; for requests whose handshake is done, in order.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_adder import Added, DecodeAdder
from sglang.srt.disaggregation.decode_admission import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_agreement import WINDOW
from sglang.srt.disaggregation.decode_budget import Accounts, AdmissionPlan, Budget, LiveReqs, Memory
from sglang.srt.disaggregation.decode_schedule import sources_of
from sglang.srt.disaggregation.request_phase import Phase
from sglang.srt.mem_cache.prefix_reader import NOTHING
from sglang.srt.mem_cache.prefix_watch import wanted_tokens

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_agreement import Ranks
    from sglang.srt.disaggregation.decode_allocation import RequestMemory
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource, Events
    from sglang.srt.disaggregation.decode_schedule import Agreed, Schedule
    from sglang.srt.disaggregation.prefill_delta import PrefillDeltas
    from sglang.srt.disaggregation.step_in_flight import Fence
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Admission", "Blocked", "Held"]

# To get at a member of an enumeration takes longer than what is done with it.
READY, ADMITTED = Phase.READY, Phase.ADMITTED
YES, LAST, NO_ROOM, NO_MEMORY, HELD = Added.YES, Added.LAST, Added.NO_ROOM, Added.NO_MEMORY, Added.HELD
# Steps of a blocked queue between two looks for aborted requests in it.
ABORT_INTERVAL = 16


class Blocked(NamedTuple):
    """A request that did not fit: what it takes, what was kept from it, and the state in which it was asked.

    free: what was free or evictable then, if that is known.
    """

    rid: str
    plan: AdmissionPlan
    kept: Memory
    version: tuple[int, ...]
    free: Memory | None = None


class Held(NamedTuple):
    """A request that a limit holds back. live: see `Limit.held_live`."""

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
        """deltas, sources: where what the tree lacks of a request comes from.

        ranks: that admit the same; None for one alone.
        """
        self._several_ranks = ranks is not None and ranks.size > 1
        self._tree, self._policy, self._accounts = tree, policy, accounts
        self.memory, self.deltas, self._events, self._sources = memory, deltas, events, sources
        self._look_every = policy.lines.look_every or ABORT_INTERVAL
        # Of the last step: the state in which no row or buffer was left; the request for which there was no memory, or
        # that a limit held back; the state in which all waited for transfers, and until when.
        self.full: tuple[int, ...] | None = None
        self.blocked: Blocked | None = None
        self.held: Held | None = None
        self.following: tuple[Hashable, float] | None = None
        # Whether all that could be candidates of the last step were; see `Agreed`.
        self.alike = True

    def has_nothing_new(
        self,
        step: int,
        queue: Sequence[DecodeRequest],
        retracted: Sequence[Req],
        schedule: Schedule,
        budget: Callable[[], Budget],
        live: Callable[[], LiveReqs],
    ) -> bool:
        """Whether a step can be left out: all handshakes are done, and what goes next does not fit, or all wait.

        Then only an abort or a lost prefill could change the queue, and that is looked for every few steps. All ranks
        decide alike: they have the same queue and pool, and whose handshake is done has been reduced.
        step: its number. retracted: these go first. Cost: the same for prompts of any length.
        """
        if retracted:
            return step % ABORT_INTERVAL != 0
        blocked, held = self.blocked, self.held
        if step % self._look_every == 0 or not queue or not self.alike:
            return False
        rows = min(self.memory.rows.available_size(), self.deltas.room())
        full = rows <= 0 and self.full == schedule.version()
        if not full and blocked is None and held is None and not self._follows_on(schedule, len(queue)):
            return False
        ready = READY
        # Without a generator, which would take longer than this in a queue of hundreds.
        for decode_req in queue:
            if decode_req.phase is not ready:
                return False
        if full:
            return True
        if held is not None:
            # While nobody ends it stays so, whatever comes into the tree.
            if held.live is None:
                return False
            now = live()
            return len(now.running) + len(now.coming) >= held.live
        if blocked is None:
            return True
        if blocked.version != schedule.version():
            return False
        return not self._has_freed(blocked) or not budget().covers(blocked.plan, blocked.kept)

    def _follows_on(self, schedule: Schedule, queued: int) -> bool:
        """Whether all still wait for transfers of others. Clocks of ranks differ: several look every few steps."""
        if self.following is None or queued > WINDOW:
            return False
        state, due = self.following
        return state == self._moves(schedule) and (self._several_ranks or time.monotonic() <= due)

    def _moves(self, schedule: Schedule) -> Hashable:
        """Another where one that waits for a transfer may be admitted; on several ranks, on all of them."""
        return schedule.version() if self._several_ranks else self._tree.watches.moves

    def _has_freed(self, blocked: Blocked) -> bool:
        """Whether there is more memory than when ``blocked`` was asked, in the same state otherwise.

        Who runs grows meanwhile, and lacks at most as much less as there is less memory. Another pool is not asked.
        """
        free = blocked.free
        return free is None or self._tree.state.has_pool or self._accounts.free(()).kv > free.kv

    def admit(
        self,
        agreed: Agreed,
        fence: Fence,
        rows: int,
        live: Callable[[], LiveReqs],
        budget: Callable[[], Budget],
        schedule: Schedule,
    ) -> list[DecodeRequest]:
        """Admit candidates in the order given, until one does not fit.

        rows: that are free for them. live, budget: the state, as it is when it is asked for.
        """
        now, window = time.monotonic(), agreed.window
        adder = DecodeAdder(
            self._policy,
            min(rows, self.deltas.room()),
            budget,
            self._accounts.reserved,
            (lambda: _waiting(window)) if len(window) > 1 else None,
            evictable=_evictable(self._tree, agreed) if self._several_ranks else None,
            limits=self._policy.hooks.limit,
            live=live,
        )
        was_blocked, self.alike = self.blocked, agreed.alike
        self.full = self.blocked = self.held = self.following = None
        admitted: list[DecodeRequest] = []
        due = math.inf
        for decode_req, may_match in agreed.candidates:
            if decode_req.is_aborted or decode_req.error is not None:
                continue
            req, entry = decode_req.req, decode_req.entry
            if self._sources and not self._several_ranks:
                entry.sources = sources_of(decode_req, self._sources)
            try:
                plan = self._plan(decode_req, entry, may_match, now, live)
            except Exception as e:
                # On all ranks: they ask the same of the same tree.
                decode_req.lose(e)
                continue
            if plan is None:
                adder.wait(lambda req=req, held=entry.watch.length + entry.coming: self._accounts.kept_for(req, held))
                due = min(due, entry.due)
                continue
            added = adder.add_one(entry, req, plan)
            if added is not YES and added is not LAST:
                self._note_refused(added, req, plan, adder, schedule, fence)
                if added is NO_MEMORY and (was_blocked is None or was_blocked.rid != req.rid):
                    self._events.blocked()
                break
            self.admit_one(decode_req, plan)
            admitted.append(decode_req)
            if added is LAST:
                break
        else:
            if due < math.inf:
                self.following = self._moves(schedule), due
        self.deltas.ask_admitted(fence)
        if admitted:
            self._events.overtaken(adder.overtaken())
        for held in self._policy.hooks.held:
            held(None if self.held is None else self.held.rid, lambda: len(_waiting(window)))
        return admitted

    def _note_refused(
        self, added: Added, req: Req, plan: AdmissionPlan, adder: DecodeAdder, schedule: Schedule, fence: Fence
    ) -> None:
        """Remember why the step ends with ``req``, and in which state."""
        if added is NO_ROOM:
            # A row that a step in flight reads is free in the next step.
            self.full = None if fence.rows else schedule.version()
        elif added is NO_MEMORY:
            self.blocked = Blocked(req.rid, plan, adder.promised, schedule.version(), self._accounts.free(()))
        elif added is HELD:
            self.held = Held(req.rid, adder.held_live)

    def _plan(
        self, decode_req: DecodeRequest, entry: QueueEntry, may_match: bool, now: float, live: Callable[[], LiveReqs]
    ) -> AdmissionPlan | None:
        """What admitting a request takes; None if it waits for the transfer of another, which brings ``entry.coming``.

        may_match: whether it may use what the tree holds, as far as its prefill and the other ranks go.
        """
        req, policy = decode_req.req, self._policy
        may_match = may_match and self._tree.accepts(req)
        # In the step in which it has shaken hands nobody has asked before.
        entry.takes_prefix = entry.takes_prefix or may_match
        if may_match and policy.may_follow:
            # Another request of this step may have become its leader.
            policy.find_leader(entry, now)
            if entry.coming:
                entry.source = None
                return None
        entry.coming = 0
        found = entry.watch.peek() if may_match and entry.watch is not None else NOTHING
        entry.stored = self._tree.tier.found(entry.host_watch, found.length) if may_match else NOTHING
        held = entry.stored if entry.stored.length else found
        takes = [source for source in entry.sources if source.takes(req, held, live)] if may_match else []
        entry.source = takes[0] if takes else None
        if takes and held.length == len(req.origin_input_ids):
            # A step has a token at least to compute, and not into a page that others read.
            prompt = self._tree.shareable(req.origin_input_ids)[:-1]
            found = self._tree.peek(prompt, req.extra_key)
            if entry.stored.length:
                entry.stored = self._tree.tier.found_of(prompt, req.extra_key, found.length)
        return self._accounts.plan(req, req.origin_input_ids, found)

    def admit_one(self, decode_req: DecodeRequest, plan: AdmissionPlan) -> None:
        """Carry out an admission. Others of the step count on it, so what raises for its memory ends the worker."""
        req, entry = decode_req.req, decode_req.entry
        held, tier = plan.found.length, self._tree.tier
        if entry.stored.length:
            # Before anything is allocated.
            decode_req.load = tier.lock(entry.stored, held, req.priority or 0)
        self.memory.give(req, req.origin_input_ids, plan)
        if decode_req.load is not None:
            tier.load(decode_req.load, req, self.memory.rows)
            held = decode_req.load.end
        # Others may follow it from now on.
        self._policy.admitted(entry, len(req.origin_input_ids) - held)
        decode_req.advance(ADMITTED)
        source = entry.source or self.deltas
        self._events.admitted(decode_req, plan.found.length, held - plan.found.length)
        try:
            source.request(decode_req)
        except Exception as e:
            decode_req.lose(e)


def _evictable(tree: DecodeRadixCache, agreed: Agreed) -> int:
    """Tokens that a step on several ranks may evict and go on, the same on all of them.

    Nobody who waits matches these, so what the ranks have agreed on stays.
    """
    if not agreed.alike or len(agreed.window) == WINDOW:
        return 0
    return max(0, tree.evictable_size() - wanted_tokens(tree.watches))


def _waiting(window: Sequence[DecodeRequest]) -> list[QueueEntry]:
    """The entries of all that could be admitted."""
    return [dr.entry for dr in window if dr.phase is READY and dr.error is None and not dr.is_aborted]
