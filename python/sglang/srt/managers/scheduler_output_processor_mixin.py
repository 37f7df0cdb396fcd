"""Results of prebuilt batches on decode.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler_output_processor_mixin as engine
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Counts the first tokens of prebuilt batches."""

    def process_batch_result_prebuilt(self, batch) -> None:
        """Counts first tokens as reasoning tokens, and frees in one group (decode tree)."""
        for req in batch.reqs:
            if req.decode_prefix_len is not None and not req.retracted_stain:
                self._maybe_update_reasoning_tokens(req, req.output_ids[0])
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_begin()
        super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_end()
