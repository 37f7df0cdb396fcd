"""Bounds the LoRA adapters of decode batches; see lora_batch.py.

Upstream: sgl-project/sglang#39332 (merged), which asks before KV is allocated.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.managers.lora_batch import AdapterHooks, held_back
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["SchedulerDisaggregationDecodeMixin"]

hooks.register(hooks.DecodeHooks, AdapterHooks.of)


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """A decode worker's loop with at most as many adapters in a batch as can be loaded."""

    def get_new_prebuilt_batch(self):
        """Keeps the batch within the limit of adapters; the engine checks it on prefill only, and ends here."""
        if not (self.enable_lora and isinstance(self.tree_cache, DecodeRadixCache)):
            return super().get_new_prebuilt_batch()
        with held_back(self):
            return super().get_new_prebuilt_batch()
