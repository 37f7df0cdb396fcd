"""Rows of requests on a decode worker, and how some are kept out of others' hands.

Upstream: none is known for a step in flight; quarantine sgl-project/sglang#35049 and #35360 (merged, off by default).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["KeptRows"]

# The engine's classes come behind.
Base: Any = object


class KeptRows(Base):
    """Rows of requests. Some may have to stay out of others' hands for a step, or through a flush."""

    def free(self, req: Req) -> None:
        """Notes on the request which row it had: a step in flight may still read it."""
        req.freed_row = req.req_pool_idx
        super().free(req)

    def reserve(self, req: Req) -> None:
        """Take the row of ``req`` out of a pool that has been cleared."""
        self.free_slots.remove(req.req_pool_idx)

    def give_last(self, rows: set[int]) -> int:
        """Hand the free ones of ``rows`` out after all others; returns how many these are."""
        # They are taken from the front, and what has just been freed is at the end: as a rule these are there already.
        last = 0
        for row in reversed(self.free_slots):
            if row not in rows:
                break
            last += 1
        if last < len(rows):
            self.free_slots.sort(key=rows.__contains__)
            last = len(rows.intersection(self.free_slots))
        return last
