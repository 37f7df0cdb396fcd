"""A decode worker whose requests have Mamba or SWA state.

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
    """Admission with the right prompt limit, and with access to the running batch."""

    def _init_radix(self, tree: DecodeRadixCache) -> None:
        if isinstance(tree.state, WindowSlots):
            # The engine limits prompts to the smaller pool, which needs to hold the window only.
            self.max_total_num_tokens = tree.pool_size
            tree.state.free_behind = lambda: self.scheduler.running_batch.free_behind_windows()
        super()._init_radix(tree)


class HybridMambaDecodeReqToTokenPool(KeptRows, engine.HybridMambaDecodeReqToTokenPool):
    """req_to_token and state slots of a hybrid model; there may be fewer state slots than req_to_token slots.

    The prefix cache holds no states: each slot is free or belongs to a request, from admission to end.
    """

    def _init_mamba_pool(self, *args, **kwargs) -> None:
        """Sizes the mapping tables by req_to_token slots; the engine sizes them by state slots."""
        super()._init_mamba_pool(*args, **kwargs)
        rows = len(self.req_to_token)
        slots = self.req_index_to_mamba_index_mapping
        self.req_index_to_mamba_index_mapping = slots.new_zeros(rows)
        if self.enable_mamba_extra_buffer:
            tracked = self.req_index_to_mamba_ping_pong_track_buffer_mapping
            self.req_index_to_mamba_ping_pong_track_buffer_mapping = tracked.new_zeros(rows, tracked.shape[1])

    def available_size(self) -> int:
        """Requests for which a req_to_token slot and its state slots are free. Replaces the engine's.

        All admissions use it. The engine's counts the former only, and runs into an assertion when states run out.
        """
        each = 1 + (self.mamba_ping_pong_track_buffer_size if self.enable_mamba_extra_buffer else 0)
        return min(len(self.free_slots), self.mamba_pool.available_size() // each)
