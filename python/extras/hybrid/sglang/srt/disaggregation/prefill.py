"""Prefill worker whose requests have Mamba or SWA state.

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
    """Sends state also if decode holds the whole prompt."""

    def state_of(self, req: Req) -> list[int] | None:
        """The state slot, or the window's pages; None without either."""
        table = self.req_to_token_pool
        if req.mamba_pool_idx is not None:
            return [int(table.req_index_to_mamba_index_mapping[req.req_pool_idx])]
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator.get_kvcache(), SWAKVPool):
            return None
        # Only for decode workers without this package: ours always need the window, so a delta remains.
        window, end = Windows(self.sliding_window_size, allocator.page_size), len(req.fill_ids)
        slots = table.req_to_token[req.req_pool_idx, window.start(end) : end]
        own = allocator.translate_loc_from_full_to_swa(slots)
        return kv_to_page_indices(own.cpu().numpy(), allocator.page_size).tolist()
