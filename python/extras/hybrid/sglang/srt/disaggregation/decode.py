"""A decode worker whose requests have states or windows.

Upstream: sgl-project/sglang#27770 (merged) and #32732 (open), which keep trees of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix.overlap_guard import KeptRows
from sglang.srt.mem_cache.window_radix_cache import WindowSlots

if TYPE_CHECKING:
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["DecodePreallocQueue", "HybridMambaDecodeReqToTokenPool"]


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Admission that knows how long a prompt may be, and which requests run."""

    def _init_radix(self, tree: DecodeRadixCache) -> None:
        if isinstance(tree.state, WindowSlots):
            # The engine's limit of a prompt is the smaller pool, which need not hold a prompt here.
            self.max_total_num_tokens = tree.pool_size
            tree.state.free_behind = lambda: self.scheduler.running_batch.free_behind_windows()
        super()._init_radix(tree)


class HybridMambaDecodeReqToTokenPool(KeptRows, engine.HybridMambaDecodeReqToTokenPool):
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
