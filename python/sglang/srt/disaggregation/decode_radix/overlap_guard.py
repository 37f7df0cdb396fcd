"""What a decode step that is under way still uses of requests that have ended since it was
launched.

With overlapped scheduling the result of one step is processed when the next has been launched. A
request that ends on that result is in the next step too, which writes one more slot of it (with
speculation, several) and reads its table row, after both have been let go. What the worker itself
does with them comes later in the same stream; what a prefill writes does not.

Upstream: none is known for what a prefill writes; sgl-project/sglang#26380 and #31687 (merged)
order the scheduler's own writes.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

__all__ = ["OPEN", "Fence", "StepInFlight", "find_step_in_flight", "raise_fence"]


class StepInFlight:
    """A step in flight, of whose batch the requests at ``ended`` have ended."""

    def __init__(self, batch: ScheduleBatch, ended: list[int], page_size: int):
        self.batch, self.ended, self.page_size = batch, ended, page_size

    @cached_property
    def pages(self) -> np.ndarray:
        """The pages, int64, that it may still write to for them."""
        return np.unique(self.batch.slots_written(self.ended) // self.page_size)

    @property
    def rows(self) -> set[int]:
        """The rows of ``req_to_token`` that it may still read for them. The host knows them without
        the device.
        """
        return {self.batch.reqs[i].freed_row for i in self.ended}

    @cached_property
    def states(self) -> set[int]:
        """What it may still write to for them of what the engine calls the state, by
        `StateKind.indices`.
        """
        return self.batch.states_written(self.ended, self.page_size)


def find_step_in_flight(scheduler: Any, page_size: int) -> StepInFlight | None:
    """The step whose result has not been processed, if a request that it was launched with has
    ended; else None.

    When requests are admitted there is one at most. All TP ranks find the same.
    """
    steps = getattr(scheduler, "result_queue", None)
    if not steps:
        return None
    batch = steps[-1][0]
    # By the attribute: each step of a long queue looks at all that run.
    ended = [i for i, req in enumerate(batch.reqs) if req.finished_reason is not None]
    return StepInFlight(batch, ended, page_size) if ended else None


class Fence(NamedTuple):
    """What one step of admission must keep from others while a step is in flight.

    A request may be given pages that this step still uses at once, but its prefill is asked for KV
    when that has been processed. Rows that it reads go to nobody meanwhile. Steps do not use
    metadata buffers.

    step: the step, if some of its requests have ended. rows: how many of the free rows it reads.
    """

    step: StepInFlight | None = None
    rows: int = 0

    def guards(self, page_indices: np.ndarray, state_indices: list[int] | None) -> bool:
        """Whether the step may still write to what a prefill is about to be asked to write."""
        if self.step is None:
            return False
        if state_indices is not None and not self.step.states.isdisjoint(state_indices):
            return True
        return bool(np.isin(page_indices, self.step.pages).any())


# While no step is in flight.
OPEN = Fence()


def raise_fence(scheduler: Any, rows: Any, page_size: int) -> Fence:
    """The fence for a step of admission. rows: the pool of requests' rows."""
    step = find_step_in_flight(scheduler, page_size)
    return OPEN if step is None else Fence(step, rows.give_last(step.rows))
