"""Adds requests to a step of admission until one does not fit; as the engine's ``PrefillAdder``,
figures in and out.

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
    """What comes of a request that is to be added."""

    YES = enum.auto()
    # It is added, and nobody after it in this step.
    LAST = enum.auto()
    # Not it, nor anybody after it: there is no row or buffer left, too little memory, a limit
    # holds it back, or it is the turn of another.
    NO_ROOM = enum.auto()
    NO_MEMORY = enum.auto()
    HELD = enum.auto()
    NOT_ITS_TURN = enum.auto()


# To get at a member of an enumeration takes longer than what is done with it.
YES, LAST = Added.YES, Added.LAST


class DecodeAdder:
    """The admissions of one step, kept up by their plans and not by what comes of them."""

    def __init__(
        self,
        room: int,
        budget: Callable[[], Budget],
        reserved: int,
        evictable: int | None = None,
        limits: Sequence[Callable[[LiveReqs], Limit]] = (),
        live: Callable[[], LiveReqs] | None = None,
    ):
        """room: requests for which there is a row and a buffer.

        budget: what the step has to give, asked for at most once, when somebody could be admitted.
        reserved: tokens kept for a request's next steps. evictable: tokens that the step may evict
        and go on; None for all. limits,
        live: see `DecodeHooks.limit`, which is asked when somebody could be admitted.
        """
        self._find_limits, self._live = limits, live
        self._limits: list[Limit] | None = None
        # After `Added.HELD`, see `Limit.held_live`.
        self.held_live: int | None = None
        self._room, self._reserved, self._find_budget, self._evictable = (
            room,
            reserved,
            budget,
            evictable,
        )
        self._budget: Budget | None = None
        # The last admission, which the budget has not been told of.
        self._untold: AdmissionPlan | None = None
        self._entries: list[QueueEntry] = []

    @property
    def promised(self) -> Memory:
        """What is kept for others. Of it `Budget.covers` keeps some."""
        return Memory(0)

    def add_one(self, entry: QueueEntry, req: Req, plan: AdmissionPlan) -> Added:
        """Add ``req``, whose admission takes ``plan``, if it fits; if so, it is admitted before the
        next is asked.
        """
        if len(self._entries) >= self._room:
            return Added.NO_ROOM
        budget = self._budget_now()
        if not budget.covers(plan, self.promised):
            return Added.NO_MEMORY
        if self._find_limits and not self._within_limits(entry, req, plan):
            return Added.HELD
        if not self._in_turn(entry):
            return Added.NOT_ITS_TURN
        self._untold = plan
        self._entries.append(entry)
        # With what earlier ones have evicted, what is available is less than nothing.
        evicts = max(0, plan.delta - budget.available)
        return YES if self._evictable is None or evicts <= self._evictable else LAST

    def _in_turn(self, entry: QueueEntry) -> bool:
        """Whether it is its turn, which it is in the order in which this is asked."""
        return True

    def _within_limits(self, entry: QueueEntry, req: Req, plan: AdmissionPlan) -> bool:
        if self._limits is None:
            assert self._live is not None
            live = self._live()
            self._limits = [find(live) for find in self._find_limits]
        for limit in self._limits:
            if not limit.add(plan, req, at_once=entry.local):
                self.held_live = limit.held_live()
                return False
        return True

    def _budget_now(self) -> Budget:
        budget = self._budget
        if budget is None:
            budget = self._budget = self._find_budget()
        elif self._untold is not None:
            budget.admit(self._untold, self._reserved)
            self._untold = None
        return budget
