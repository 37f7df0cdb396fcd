"""Builds the tree of a worker with a decode radix cache. What it may be, and what is refused, is in `cache_support.py`.

The engine builds its own first, with the pools. The tree for a model with states or windows is the one for KV alone:
both come from prefill with every request, so none has to be kept for a prefix; see `mamba_radix_cache.py` and
`swa_radix_cache.py`.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import DECODE, FLAG, LINEAR, WINDOWS, CacheKind
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.window_radix_cache import WindowRadixCache

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["build", "kind_of", "prepare"]


def kind_of(runner: Any) -> CacheKind:
    """The kind of tree that the model of a decode worker's model runner takes."""
    if runner.hybrid_gdn_config is not None:
        return LINEAR
    return WINDOWS if runner.is_hybrid_swa else DECODE


def prepare(kind: CacheKind, args: ServerArgs, rows: Callable[[], Any]) -> None:
    """Before the engine builds its tree: have it build the one of KV alone. rows: the pool of requests' rows.

    Raises ValueError for options that are not verified with this kind.
    """
    if kind is not DECODE:
        cache_support.check(kind, args)
        rows().kv_alone = True


def build(
    kind: CacheKind,
    engines: Any,
    runner: Any,
    window_size: Callable[[], int],
) -> DecodeRadixCache:
    """The decode tree for the pools of the tree that the engine has built.

    window_size: tokens, of a model with sliding windows. Raises ValueError for a model that is not verified.
    """
    if type(engines) is not RadixCache:
        raise ValueError(
            f"{FLAG} is not verified for this model: the engine chose {type(engines).__name__} for it, "
            "and only models with full attention throughout (RadixCache), or in some layers linear attention of "
            "the kind of Qwen3-Next (GDN) or sliding windows, are. Start this decode worker without the flag."
        )
    cache_support.check_tree(FLAG, engines)
    if kind is DECODE and hasattr(runner.token_to_kv_pool, "get_state_buf_infos"):
        raise ValueError(
            f"{FLAG} is not verified for this model: beside KV it keeps what the engine calls state "
            f"({type(runner.token_to_kv_pool).__name__}). Start this decode worker without the flag."
        )
    if kind is WINDOWS:
        return WindowRadixCache.take_over(engines, window_size())
    return DecodeRadixCache.take_over(engines)
