"""Combinations with host memory that are refused, as rules added to `cache_support.py` on import.

Upstream: none; the rules name what was verified here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.cache_support import DECODE, FLAG, Refused, Rule, kinds_with, replace, switch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["STORAGES"]

OPTION = "--enable-hierarchical-cache"
# The engine's storage backends that are supported below host memory.
STORAGES = ("file", "mooncake")


def _host_tier(name: str, used: Callable[[ServerArgs], object]) -> Rule:
    """A rule that refuses host memory with ``name``."""
    return Rule(f"{OPTION} with {name}", lambda args: args.enable_hierarchical_cache and used(args))


replace(
    DECODE,
    OPTION,
    # Why not the others: docs/decisions/host-storage.md.
    _host_tier(
        f"--hicache-storage-backend {{args.hicache_storage_backend}} ({', '.join(STORAGES)} are)",
        lambda args: args.hicache_storage_backend not in (None, *STORAGES),
    ),
    _host_tier("--hicache-write-policy write_back", lambda args: args.hicache_write_policy == "write_back"),
)
for kind in kinds_with("linear attention"):
    kind.refused += (
        Refused(
            f"{FLAG} is not verified for a model with linear attention together with {{name}}. Leave one of them out.",
            (_host_tier("--speculative-algorithm", lambda args: args.speculative_algorithm is not None),),
        ),
    )
STORAGE = _host_tier("--hicache-storage-backend", lambda args: args.hicache_storage_backend is not None)
for kind in kinds_with("sliding windows"):
    replace(kind, OPTION, switch(OPTION), STORAGE)
# The engine's storages do not store index keys.
for kind in kinds_with("sparse attention"):
    replace(kind, OPTION, STORAGE)
