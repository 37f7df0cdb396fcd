"""req_to_token slots that are withheld from other requests for a while.

Upstream: none is known for a step in flight; quarantine sgl-project/sglang#35049 and #35360
(merged, off by default).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["KeptRows"]

# The engine's pool follows in the MRO.
Base: Any = object


class KeptRows(Base):
    """req_to_token slots, of which some are withheld for a step or through a flush."""

    def free(self, req: Req) -> None:
        """Notes the freed slot on the request: an in-flight batch may still read it."""
        req.freed_row = req.req_pool_idx
        super().free(req)

    def reserve(self, req: Req) -> None:
        """Take the slot of ``req`` out of a cleared pool."""
        self.free_slots.remove(req.req_pool_idx)

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
