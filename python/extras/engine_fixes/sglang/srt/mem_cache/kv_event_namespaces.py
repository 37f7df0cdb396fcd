"""KV events of prompts with an ``extra_key`` (a salt, an adapter), kept apart from those of the same tokens without.

The engine names a page in its events by the tokens up to its end alone. Two requests whose KV must not be shared then
have one name for two pages, and who listens takes both for gone when one is evicted. Here the chain of names begins
with the ``extra_key``, if there is one. Without, names are the engine's.

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
    """The hash, hexadecimal, on which the first page of a prompt with this ``extra_key`` is chained."""
    # JSON can bring a surrogate that stands alone.
    return hashlib.sha256(extra_key.encode("utf-8", "surrogatepass")).hexdigest()


def record_store(tree: RadixCache, node: TreeNode, record: Callable[[TreeNode], None]) -> None:
    """Have the engine ``record`` the events of a new node, whose pages get their names here where it has an extra_key.

    The event of a first page names the extra_key's hash as its parent, which is no page: who works out names of its own
    from tokens finds no place for it, instead of a wrong one.
    """
    extra_key = node.key.extra_key
    if not tree.enable_kv_cache_events or extra_key is None or node.parent is not tree.root_node:
        # Further down, names follow from the parent's.
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
    """Layer of each decode tree, whose events tell prompts with an ``extra_key`` apart."""

    def _record_store_event(self, node: TreeNode) -> None:
        record_store(self, node, super()._record_store_event)
