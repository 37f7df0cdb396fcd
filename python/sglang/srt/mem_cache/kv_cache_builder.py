"""Builds the decode tree of a worker. `cache_support.py` has the table of what is refused.

The engine first builds its own tree and the pools. Prefill sends what a request has besides KV with
every request, so the tree keeps KV only, and has a `StateKind` for the rest.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.state_kind import StateKind, kinds

__all__ = ["build", "check_pool"]


def build(kind: type[StateKind], engines: Any, scheduler: Any) -> DecodeRadixCache:
    """Build the decode tree for the pools of ``engines``, the engine's tree.

    Raises ValueError for a model that is not verified.
    """
    if type(engines) is not RadixCache:
        others = " or ".join(other.layers for other in kinds() if other.word)
        others = f", or in some layers {others}, are" if others else " are without the extra hybrid"
        raise ValueError(
            f"{FLAG} is not verified for this model: the engine chose {type(engines).__name__} "
            f"for it, and only models with full attention throughout (RadixCache){others}. "
            "Start this decode worker without the flag."
        )
    cache_support.check_tree(FLAG, engines)
    check_pool(kind, scheduler.tp_worker.model_runner)
    if (own := kind.take_over(engines, scheduler)) is not None:
        return own
    tree = DecodeRadixCache.take_over(engines)
    tree.state = kind.beside(tree)
    return tree


def check_pool(kind: type[StateKind], runner: Any) -> None:
    """Raise ValueError if the KV pool keeps state and no extra has its kind."""
    if kind is StateKind and hasattr(runner.token_to_kv_pool, "get_state_buf_infos"):
        raise ValueError(
            f"{FLAG} is not verified for this model: beside KV it keeps what the engine calls "
            f"state ({type(runner.token_to_kv_pool).__name__}). "
            "Start this decode worker without the flag."
        )
