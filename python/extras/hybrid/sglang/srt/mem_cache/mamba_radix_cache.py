"""Replaces the engine's tree for models with states by one of KV alone, on decode workers with a radix cache.

States come from prefill with every request, so the tree keeps none.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import mamba_radix_cache as engine
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["MambaRadixCache"]


class MambaRadixCache(engine.MambaRadixCache):
    """The engine's tree, or one of KV alone if the pool is marked so."""

    def __new__(cls, params: CacheInitParams, *args: Any, **kwargs: Any) -> Any:
        """Returns a `RadixCache` for marked pools, see ``managers/scheduler.py``."""
        if cls is MambaRadixCache and getattr(params.req_to_token_pool, "kv_alone", False):
            return RadixCache(params)
        return super().__new__(cls)
