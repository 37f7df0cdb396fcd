"""Rows and state slots of requests on a decode worker, and how some are kept out of others' hands.

Upstream: none is known for a step in flight; quarantine sgl-project/sglang#35049 and #35360 (merged, off by default).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["KeptRows", "KeptStates"]

# The engine's classes come behind.
Base: Any = object


class KeptRows(Base):
    """Rows of requests. Some may have to stay out of others' hands for a step, or through a flush."""

    # Whether the tree over these requests holds KV alone, of a model that has states or windows as well.
    kv_alone = False

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


class KeptStates(KeptRows):
    """Rows and state slots of the requests of a hybrid model. The state pool may have fewer slots than there are rows.

    The prefix cache holds no states, so all slots are requests' or free, and a request has its own from its admission
    to its end.
    """

    def _init_mamba_pool(self, *args, **kwargs) -> None:
        """The tables from rows to slots have an entry for each row; the engine makes one for each slot."""
        super()._init_mamba_pool(*args, **kwargs)
        rows = len(self.req_to_token)
        slots = self.req_index_to_mamba_index_mapping
        self.req_index_to_mamba_index_mapping = slots.new_zeros(rows)
        if self.enable_mamba_extra_buffer:
            tracked = self.req_index_to_mamba_ping_pong_track_buffer_mapping
            self.req_index_to_mamba_ping_pong_track_buffer_mapping = tracked.new_zeros(rows, tracked.shape[1])

    def available_size(self) -> int:
        """Replaces the engine's number of free rows: requests for which there are a row and the state slots it takes.

        All admissions ask this. The engine's run into an assertion when rows are left and slots are not.
        """
        each = 1 + (self.mamba_ping_pong_track_buffer_size if self.enable_mamba_extra_buffer else 0)
        return min(len(self.free_slots), self.mamba_pool.available_size() // each)

    def reserve(self, req: Req) -> None:
        """Take the row and the state slot of ``req`` out of pools that have been cleared."""
        super().reserve(req)
        if req.mamba_pool_idx is not None:
            self.mamba_pool.reserve(req.mamba_pool_idx)
            self.req_index_to_mamba_index_mapping[req.req_pool_idx] = req.mamba_pool_idx
