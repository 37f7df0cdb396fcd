"""Admits requests in one step until one does not fit; like the engine's ``PrefillAdder``.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, Budget, Memory

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
    from sglang.srt.disaggregation.decode_radix.hooks import Limit
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["Added", "DecodeAdder"]


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


# Access to a member of an enumeration takes longer than its use.
YES, LAST = Added.YES, Added.LAST


class DecodeAdder:
    """The admissions of one step, counted by their plans and not by their outcome."""

    def __init__(
        self,
        room: int,
        budget: Callable[[], Budget],
        reserved: int,
        evictable: int | None = None,
        limits: Sequence[Callable[[LiveReqs], Limit]] = (),
        live: Callable[[], LiveReqs] | None = None,
    ):
        """room: number of requests for which there are a req_to_token slot and a metadata buffer.

        reserved: tokens for a request's next steps. evictable: if the step evicts more tokens, it
        ends; None: no bound. limits: see `DecodeHooks.limit`. budget, live: state of the step;
        called at most once, when a request could be admitted.
        """
        self._make_limits, self._live = limits, live
        self._limits: list[Limit] | None = None
        # After `Added.HELD`: see `Limit.held_live`.
        self.held_live: int | None = None
        self._capacity, self._reserved, self._make_budget, self._evictable = (
            room,
            reserved,
            budget,
            evictable,
        )
        self._budget: Budget | None = None
        # The last admission, not yet in the budget.
        self._uncounted: AdmissionPlan | None = None
        self._entries: list[QueueEntry] = []

    @property
    def promised(self) -> Memory:
        """Memory kept for other requests, at most as `Budget.covers` allows."""
        return Memory(0)

    def add_one(self, entry: QueueEntry, req: Req, plan: AdmissionPlan) -> Added:
        """Add ``req`` if ``plan`` fits. The caller admits it before it adds the next."""
        if len(self._entries) >= self._capacity:
            return Added.NO_ROOM
        budget = self._budget_now()
        if not budget.covers(plan, self.promised):
            return Added.NO_MEMORY
        if self._make_limits and not self._within_limits(entry, req, plan):
            return Added.HELD
        if not self._in_turn(entry):
            return Added.NOT_ITS_TURN
        self._uncounted = plan
        self._entries.append(entry)
        # ``available`` is negative after evictions by earlier admissions.
        evicts = max(0, plan.delta - budget.available)
        return YES if self._evictable is None or evicts <= self._evictable else LAST

    def _in_turn(self, entry: QueueEntry) -> bool:
        """Whether it is this request's turn; called in the order of admission."""
        return True

    def _within_limits(self, entry: QueueEntry, req: Req, plan: AdmissionPlan) -> bool:
        if self._limits is None:
            assert self._live is not None
            live = self._live()
            self._limits = [make(live) for make in self._make_limits]
        for limit in self._limits:
            if not limit.add(plan, req, at_once=entry.local):
                self.held_live = limit.held_live()
                return False
        return True

    def _budget_now(self) -> Budget:
        budget = self._budget
        if budget is None:
            budget = self._budget = self._make_budget()
        elif self._uncounted is not None:
            budget.admit(self._uncounted, self._reserved)
            self._uncounted = None
        return budget
