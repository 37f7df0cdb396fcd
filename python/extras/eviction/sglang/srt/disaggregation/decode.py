"""Admission that keeps some memory free.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import decode as engine
from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.free_watermark import kept_free
from sglang.srt.mem_cache.leaf_eviction import EvictingRadixCache

__all__ = ["DecodePreallocQueue"]

add_layer(EvictingRadixCache)


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Evicts to the watermark after admissions."""

    def _init_radix(self, tree: Any) -> None:
        super()._init_radix(tree)
        tree.watermark = kept_free(self.gloo_group, tree.watermark)

    def _admit(self, agreed: Any, guard: Any) -> list[Any]:
        admitted = super()._admit(agreed, guard)
        if self.admission.blocked is None:
            # A blocked request may be waiting for this very prefix.
            self.radix.evict_to_watermark()
        return admitted
