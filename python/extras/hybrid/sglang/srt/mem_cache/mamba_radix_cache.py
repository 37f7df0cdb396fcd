"""The engine's tree for models with states beside KV; a decode worker with a radix cache has one of KV alone.

States come from prefill with every request, so none has to be kept for a prefix.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import mamba_radix_cache as engine
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["MambaRadixCache"]


class MambaRadixCache(engine.MambaRadixCache):
    """A tree of KV and states, or of KV alone where the rows of its requests say so."""

    def __new__(cls, params: CacheInitParams, *args: Any, **kwargs: Any) -> Any:
        """Gives the engine the tree of KV alone for pools that are marked so, see ``managers/scheduler.py``."""
        if cls is MambaRadixCache and getattr(params.req_to_token_pool, "kv_alone", False):
            return RadixCache(params)
        return super().__new__(cls)
