"""Prefill worker whose requests have states or windows.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.utils import kv_to_page_indices
from sglang.srt.mem_cache.decode_windows import Windows
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["SchedulerDisaggregationPrefillMixin"]


class SchedulerDisaggregationPrefillMixin(engine.SchedulerDisaggregationPrefillMixin):
    """Sends them also where decode holds the whole prompt."""

    def state_of(self, req: Req) -> list[int] | None:
        """Slot of a state, pages of a window, None for others."""
        table = self.req_to_token_pool
        if req.mamba_pool_idx is not None:
            return [int(table.req_index_to_mamba_index_mapping[req.req_pool_idx])]
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator.get_kvcache(), SWAKVPool):
            return None
        # Decode workers of this package lack the window of every prompt and do not come here.
        window, end = Windows(self.sliding_window_size, allocator.page_size), len(req.fill_ids)
        slots = table.req_to_token[req.req_pool_idx, window.start(end) : end]
        own = allocator.translate_loc_from_full_to_swa(slots)
        return kv_to_page_indices(own.cpu().numpy(), allocator.page_size).tolist()
