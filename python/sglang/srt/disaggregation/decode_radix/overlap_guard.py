"""Overlap guard: what an in-flight batch still uses of requests that have ended since its launch.

With overlapped scheduling, the result of a step is processed after the launch of the next. A
request that ends on that result is also in the next batch. This batch writes one more KV slot of it
(several with speculation) and reads its req_to_token slot, after both were released. The worker's
own later uses follow in the same stream; a prefill's writes do not.

Upstream: none is known for what a prefill writes; sgl-project/sglang#26380 and #31687 (merged)
order the scheduler's own writes; for quarantine #35049 and #35360 (merged, off by default).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class OverlapGuard:
    """What one admission step must not hand out while a batch is in flight.

    A request may get pages that the batch still uses, but prefill is asked for its KV only when the
    batch has been processed. req_to_token slots that it reads stay reserved. Batches do not use
    metadata buffers.
    """

    def __init__(self, batch: ScheduleBatch | None, ended: Sequence[int], page_size: int):
        """ended: indices of the batch's requests that have ended."""
        self.batch: Any = batch
        self.ended, self.page_size = ended, page_size
        # Free req_to_token slots that the batch reads.
        self.rows = 0

    @cached_property
    def pages(self) -> np.ndarray:
        """Pages, int64, that the batch may still write for ended requests."""
        return np.unique(self.batch.slots_written(self.ended) // self.page_size)

    @cached_property
    def states(self) -> set[int]:
        """State indices (`StateKind.indices`) that it may still write for them."""
        return self.batch.states_written(self.ended, self.page_size)

    @property
    def rows_read(self) -> set[int]:
        """``req_to_token`` slots that it may still read for them; known without the device."""
        return {self.batch.reqs[i].freed_row for i in self.ended}

    def covers(self, page_indices: np.ndarray, state_indices: list[int] | None) -> bool:
        """Whether the batch may still write to what prefill is about to be asked to write."""
        if not self.ended:
            return False
        if state_indices is not None and not self.states.isdisjoint(state_indices):
            return True
        return bool(np.isin(page_indices, self.pages).any())


# Without such a batch.
OPEN = OverlapGuard(None, (), 1)


def make_guard(scheduler: Any, rows: Any, page_size: int) -> OverlapGuard:
    """The guard for an admission step: of the unprocessed batch, if a request in it has ended.

    There is at most one, the same on all ranks. rows: the pool of req_to_token slots.
    """
    steps = getattr(scheduler, "result_queue", None)
    if not steps:
        return OPEN
    batch = steps[-1][0]
    # The attribute, not a call: each step with a long queue looks at all running requests.
    ended = [i for i, req in enumerate(batch.reqs) if req.finished_reason is not None]
    if not ended:
        return OPEN
    guard = OverlapGuard(batch, ended, page_size)
    guard.rows = rows.give_last(guard.rows_read)
    return guard


# The engine's pool follows in the MRO.
Base: Any = object


class KeptRows(Base):
    """req_to_token slots, of which some are withheld for a step."""

    def free(self, req: Req) -> None:
        """Notes the freed slot on the request: an in-flight batch may still read it."""
        req.freed_row = req.req_pool_idx
        super().free(req)

    def give_last(self, rows: set[int]) -> int:
        """Hand out the free slots of ``rows`` after all others; returns how many they are."""
        # Slots are taken from the front and freed to the end: usually these are last already.
        last = 0
        for row in reversed(self.free_slots):
            if row not in rows:
                break
            last += 1
        if last < len(rows):
            self.free_slots.sort(key=rows.__contains__)
            last = len(rows.intersection(self.free_slots))
        return last
