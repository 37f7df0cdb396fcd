"""``kv_pool`` in a worker's internal state.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree_audit import audit_unheld_pages

__all__ = ["Pools"]


@dataclass(frozen=True)
class Pools:
    """The pools of a worker. size: of the KV pool, in tokens. buffers: metadata buffers; None without."""

    tree: Any
    allocator: Any
    rows: Any
    size: int
    buffers: Any = None

    def has_one_kv_pool(self) -> bool:
        """Whether one pool has all KV, so that its figures cover what requests hold."""
        return type(self.tree) in (RadixCache, ChunkCache) or hasattr(self.tree, "tier")

    def available_tokens(self) -> int:
        """Free tokens of the pool that the tree uses."""
        pool = self.tree.pool if isinstance(self.tree, DecodeRadixCache) else self.allocator
        return pool.available_size()

    def state(self, idle: bool, record: dict[str, Any], manager: Any = None) -> dict[str, Any]:
        """Figures of all pools, in tokens, rows, buffers, rooms and slots; with ``idle`` also the audit's faults.

        KV figures only if one pool has all KV. record: further fields. manager: the transfer backend's, if there is
        one.
        """
        tree, rows = self.tree, self.rows
        state: dict[str, Any] = {}
        if self.has_one_kv_pool():
            state = {
                "size": self.size,
                "available": self.available_tokens(),
                "evictable": tree.evictable_size(),
                "protected": tree.protected_size(),
            }
        state |= {
            **record,
            "idle": idle,
            "free_req_slots": len(rows.free_slots),
            "req_slots": rows.size + getattr(rows, "pre_alloc_size", 0),
        }
        if self.buffers is not None:
            state |= {"metadata_buffers": self.buffers.size, "free_metadata_buffers": self.buffers.available_size()}
        if isinstance(manager, CommonKVManager):
            state["rooms"] = manager.rooms_held()
        if isinstance(tree, DecodeRadixCache):
            state |= {"locks_taken": tree.locks_taken, "locks_released": tree.locks_released}
            if idle and "audit" not in state:
                state["audit"] = self.audit()
            if host := tree.tier.report():
                state["host"] = host
        return state

    def audit(self) -> list[str]:
        """Every inconsistency of the tree and the pools of an idle decode worker with the flag.

        Retracted requests hold nothing of these either.
        """
        tier = self.tree.tier
        faults = [*self.tree.audit([]), *audit_unheld_pages(self.tree, tier), *tier.faults()]
        rows = self.rows
        faults += _not_all_free("rows", rows.free_slots, range(rows.size + getattr(rows, "pre_alloc_size", 0)))
        if self.buffers is not None:
            faults += _not_all_free("metadata buffers", self.buffers.free_slots, range(self.buffers.size))
        return faults + self.tree.state.faults()


def _not_all_free(what: str, free: Iterable[int], places: range) -> list[str]:
    """The difference if ``free`` is not exactly ``places``."""
    free = sorted(free)
    if free == list(places):
        return []
    different = len(set(places).intersection(free))
    return [f"{different} different {what} are free, {len(free)} in all, and there are {len(places)}"]
