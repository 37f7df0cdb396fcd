"""An admission step in which requests may wait for others' transfers, or go out of turn.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.admission import Admission, DecodeAdder, all_ready, waiting
from sglang.srt.disaggregation.decode_radix.budget import Memory
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.disaggregation.prefix_policy import PrefixEntry, PrefixPolicy, Turns
from sglang.srt.mem_cache.prefix_reader import PrefixPeek
from sglang.srt.mem_cache.prefix_watch import wanted_tokens

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.schedule import Agreed
    from sglang.srt.disaggregation.prefix_schedule import PrefixSchedule
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["PrefixAdder", "PrefixAdmission"]


class PrefixAdder(DecodeAdder):
    """Adds requests, out of turn as often as the policy allows."""

    def __init__(
        self, policy: PrefixPolicy, waiting: Callable[[], Sequence[PrefixEntry]] | None, *args: Any, **more: Any
    ):
        """waiting: entries of all requests that could be admitted; None if there is only one. Called at most once,
        before the first admission."""
        super().__init__(*args, **more)
        self._policy, self._waiting = policy, waiting
        self._turns: Turns | None = None
        # Memory for requests that wait for transfers; computed when another request could be admitted.
        self._waits: list[Callable[[], Memory]] = []
        self._promised = Memory(0)

    def wait(self, needs: Callable[[], Memory]) -> None:
        """A request waits for a transfer and goes first after it. needs: its memory then."""
        self._waits.append(needs)

    @property
    def promised(self) -> Memory:
        """Memory kept for all waiting requests."""
        for needs in self._waits:
            self._promised = self._promised.plus(needs())
        self._waits.clear()
        return self._promised

    def _in_turn(self, entry: Any) -> bool:
        if self._turns is None and self._waiting is not None:
            self._turns = Turns(self._policy, self._waiting())
        return self._turns is None or self._turns.take(entry)

    def overtaken(self) -> int:
        """Number of requests that the step's admissions bypassed; called at its end."""
        entries: Sequence[Any] = self._entries
        return self._turns.end(entries) if entries and self._turns is not None else 0


class PrefixAdmission(Admission):
    """Admits requests, except those that wait for another's transfer."""

    _policy: PrefixPolicy
    _schedule: PrefixSchedule

    def __init__(self, *args: Any):
        super().__init__(*args)
        # From the last step: the state in which all waited for transfers, and until when; see `PrefixSchedule.alike`.
        self.following: tuple[Hashable, float] | None = None
        self.alike = True

    def has_nothing_new(self, step: int, queue: Any, retracted: Any) -> bool:
        """Also if all requests wait for transfers."""
        if not retracted and not self.alike:
            return False
        if retracted or self.following is None:
            return super().has_nothing_new(step, queue, retracted)
        return step % self.look_every != 0 and bool(queue) and self._follows_on(queue) and all_ready(queue)

    def _follows_on(self, queue: Sequence[DecodeRequest]) -> bool:
        """Whether all still wait for transfers. Clocks of ranks differ: several ranks look every few steps."""
        if self.following is None or len(queue) > WINDOW:
            return False
        state, due = self.following
        return state == self._moves() and (self._several_ranks or time.monotonic() <= due)

    def _moves(self) -> Hashable:
        """Changes if a waiting request may become ready for admission; with several ranks, on all of them."""
        return self._schedule.version() if self._several_ranks else self._policy.watches.moves

    def admit(self, agreed: Agreed, *args: Any) -> list[DecodeRequest]:
        self.following, self.alike = None, self._schedule.alike
        going = agreed._replace(candidates=self._others(agreed.candidates))
        admitted = super().admit(going, *args)
        if admitted:
            self._events.overtaken(self._adding.overtaken())
        return admitted

    def _others(self, candidates: Iterable[tuple[DecodeRequest, bool]]) -> Iterator[tuple[DecodeRequest, bool]]:
        """Requests that wait for no transfer. A generator: each admission may become the leader of later requests."""
        now, due = time.monotonic(), math.inf
        for decode_req, may_match in candidates:
            if decode_req.is_aborted or decode_req.error is not None:
                continue
            req, entry = decode_req.req, decode_req.entry
            try:
                follows = self._follows(decode_req, entry, may_match, now)
            except Exception as e:
                # Fails on all ranks alike: their trees are the same.
                decode_req.mark_failed(e)
                continue
            if follows:
                self._adding.wait(partial(self._kept_for, req, entry.watch.length + entry.coming))
                due = min(due, entry.due)
            else:
                yield decode_req, may_match
        # All were looked at.
        if due < math.inf:
            self.following = self._moves(), due

    def _kept_for(self, req: Req, held: int) -> Memory:
        """Memory that ``req`` needs once the tree holds ``held`` tokens of its prompt."""
        plan = self._accounts.plan(req, req.origin_input_ids, PrefixPeek(held, 0, [], 0))
        return Memory(max(0, plan.soon), plan.beside.soon)

    def _follows(self, decode_req: DecodeRequest, entry: PrefixEntry, may_match: bool, now: float) -> bool:
        """Whether it waits for a transfer; ``entry.coming`` are its tokens."""
        policy = self._policy
        may_match = may_match and self._tree.accepts(decode_req.req)
        # The schedule has not looked at it in the step of its handshake.
        entry.takes_prefix = entry.takes_prefix or may_match
        if may_match and policy.may_follow:
            # Its leader may have been admitted in this step.
            policy.find_leader(entry, now)
            if entry.coming:
                entry.source = None
                return True
        entry.coming = 0
        return False

    def _adder(self, window: Sequence[DecodeRequest], room: int) -> PrefixAdder:
        entries: Any = (lambda: waiting(window)) if len(window) > 1 else None
        evictable = self._evictable(window) if self._several_ranks else None
        self._adding = PrefixAdder(self._policy, entries, room, *self._for_adder(evictable))
        return self._adding

    def _evictable(self, window: Sequence[DecodeRequest]) -> int:
        """Tokens that a step on several ranks may evict without ending; equal on all ranks.

        Only tokens that no waiting request matches, if eviction takes these first: then the agreed matches stay valid.
        """
        if not self.alike or len(window) == WINDOW or not hasattr(self._tree, "victims"):
            return 0
        return max(0, self._tree.evictable_size() - wanted_tokens(self._policy.watches))
