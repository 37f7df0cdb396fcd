"""Builds the tree of a worker with a decode radix cache. What it may be, and what is refused, is in `cache_support.py`.

The engine builds its own first, with the pools. What a request has beside KV comes from prefill with every request, so
none of it has to be kept for a prefix: the tree is the one for KV alone, with a `StateKind`.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.state_kind import StateKind, kinds

__all__ = ["build"]


def build(kind: type[StateKind], engines: Any, scheduler: Any) -> DecodeRadixCache:
    """The decode tree for the pools of the tree that the engine has built.

    Raises ValueError for a model that is not verified.
    """
    if type(engines) is not RadixCache:
        others = " or ".join(other.layers for other in kinds())
        others = f", or in some layers {others}, are" if others else " are without the extra hybrid"
        raise ValueError(
            f"{FLAG} is not verified for this model: the engine chose {type(engines).__name__} for it, "
            f"and only models with full attention throughout (RadixCache){others}. "
            "Start this decode worker without the flag."
        )
    cache_support.check_tree(FLAG, engines)
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool if kind is StateKind else None
    if hasattr(pool, "get_state_buf_infos"):
        raise ValueError(
            f"{FLAG} is not verified for this model: beside KV it keeps what the engine calls state "
            f"({type(pool).__name__}). Start this decode worker without the flag."
        )
    return DecodeRadixCache.take_over(engines) if kind is StateKind else kind.take_over(engines, scheduler)
