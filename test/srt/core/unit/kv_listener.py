"""Who listens to a worker's KV events, and what he should know: the pages of its tree, found without them."""

from __future__ import annotations

import hashlib

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.hicache_storage import get_hash_str, hash_str_to_int64
from sglang.srt.mem_cache.radix_cache import RadixCache


class Listener:
    """What a router makes of events: pages by name, each with the page before it."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}

    def hear(self, events) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.parents.clear()
            elif isinstance(event, BlockStored):
                (name,) = event.block_hashes
                assert name not in self.parents, "a page is stored that is there"
                self.parents[name] = event.parent_block_hash
            else:
                assert isinstance(event, BlockRemoved)
                for name in event.block_hashes:
                    del self.parents[name]


def names_of(token_ids, extra_key, page) -> list[int]:
    """Of the whole pages of a prompt: SHA-256 over the name before and the tokens, as in the engine."""
    name = None if extra_key is None else hashlib.sha256(extra_key.encode("utf-8", "surrogatepass")).hexdigest()
    names = []
    for start in range(0, len(token_ids) // page * page, page):
        name = get_hash_str(list(token_ids[start : start + page]), name)
        names.append(hash_str_to_int64(name))
    return names


def names_in(tree: RadixCache) -> list[int]:
    """Of all pages in the tree, found from its root and tokens alone."""
    names: list[int] = []
    stack = [(node, []) for node in tree.root_node.children.values()]
    while stack:
        node, before = stack.pop()
        path = before + list(node.key.token_ids)
        names += names_of(path, node.key.extra_key, tree.page_size)[len(before) // tree.page_size :]
        stack += [(child, path) for child in node.children.values()]
    return names
