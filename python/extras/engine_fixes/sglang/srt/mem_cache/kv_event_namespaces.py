"""Separates KV events of prompts with an ``extra_key`` (a salt, an adapter) from those of equal tokens without one.

The engine derives a page's hash in its events from the tokens up to its end alone. Two pages whose KV must not be
shared can then have the same hash, and a subscriber removes both when one is evicted. Here the chain of hashes begins
with the ``extra_key``, if there is one. Without it, hashes are the engine's.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.hicache_storage import get_hash_str, hash_str_to_int64

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

__all__ = ["NamespacedRadixCache", "namespace_hash", "record_store"]


def namespace_hash(extra_key: str) -> str:
    """Hexadecimal hash that precedes the first page of a prompt with this ``extra_key``."""
    # JSON may contain a lone surrogate.
    return hashlib.sha256(extra_key.encode("utf-8", "surrogatepass")).hexdigest()


def record_store(tree: RadixCache, node: TreeNode, record: Callable[[TreeNode], None]) -> None:
    """Call ``record`` for a new node; with an extra_key, its pages first get their hashes here.

    The event of the first page has the extra_key's hash as parent, which is no page's: a subscriber that computes
    hashes from tokens finds no parent, instead of a wrong one.
    """
    extra_key = node.key.extra_key
    if not tree.enable_kv_cache_events or extra_key is None or node.parent is not tree.root_node:
        # Hashes of lower nodes follow from the parent's.
        record(node)
        return
    namespace = name = namespace_hash(extra_key)
    tokens, page = node.key.token_ids, tree.page_size
    node.hash_value = []
    for start in range(0, len(tokens), page):
        name = get_hash_str(tokens[start : start + page], prior_hash=name)
        node.hash_value.append(name)
    first = len(tree.kv_event_queue)
    record(node)
    tree.kv_event_queue[first].parent_block_hash = hash_str_to_int64(namespace)


class NamespacedRadixCache(DecodeRadixCache):
    """Layer of each decode tree that separates prompts with an ``extra_key`` in events."""

    def _record_store_event(self, node: TreeNode) -> None:
        record_store(self, node, super()._record_store_event)
