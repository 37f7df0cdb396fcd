"""Adds audits to decode trees; see ``mem_cache/tree_audit.py``.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.tree_audit import AuditedRadixCache

__all__: list[str] = []

add_layer(AuditedRadixCache)
