"""Separates prompts with an ``extra_key`` in KV events of decode trees; see ``mem_cache/kv_event_namespaces.py``.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.kv_event_namespaces import NamespacedRadixCache

__all__: list[str] = []

add_layer(NamespacedRadixCache)
