"""Options refused with the decode tree and index pages, added to `cache_support.py`.

Upstream: none: it names what has been verified here.
"""

from __future__ import annotations

from sglang.srt.mem_cache.cache_support import FLAG, KINDS, SPECULATION, CacheKind, Refused, switch

__all__ = ["INDEXED", "LAYERS"]

LAYERS = "sparse attention of DeepSeek-V3.2 (NSA)"

INDEXED = CacheKind(
    f"the same, {LAYERS}",
    "DecodeRadixCache",
    (
        Refused(
            f"{FLAG} is not verified for a model with {LAYERS} together with {{name}}. Leave one of the two out.",
            (SPECULATION, switch("--enable-hierarchical-cache")),
        ),
    ),
)
KINDS.append(INDEXED)
