"""Admission that keeps some memory free when it has been asked.

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
    """Admission with a decode-side radix cache that evicts to a watermark."""

    def _init_radix(self, tree: Any) -> None:
        super()._init_radix(tree)
        tree.watermark = kept_free(self.gloo_group, tree.watermark)

    def _admit(self, agreed: Any, guard: Any) -> list[Any]:
        admitted = super()._admit(agreed, guard)
        if self.admission.blocked is None:
            # While a request waits for memory, what is cached may be what it waits for.
            self.radix.evict_to_watermark()
        return admitted
