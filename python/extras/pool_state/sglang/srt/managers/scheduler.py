"""Scheduler that reports its pools.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.decode_radix.hooks import hooks_of
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.kv_pool_state import Pools

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Reports the pool figures of invariant I1 in ``kv_pool``, in tokens if one pool has all KV."""

    def pools(self) -> Pools:
        """The present pools of this worker."""
        return Pools(
            tree=self.tree_cache,
            allocator=self.token_to_kv_pool_allocator,
            rows=getattr(self, "req_to_token_pool", None),
            size=self.max_total_num_tokens,
            buffers=getattr(self, "req_to_metadata_buffer_idx_allocator", None),
        )

    def kv_pool_state(self) -> dict[str, Any]:
        """The content of ``kv_pool``."""
        idle = self.rests()
        return self.pools().state(idle, self.pool_record(idle), self.kv_manager())

    def pool_record(self, idle: bool) -> dict[str, Any]:
        """Fields beside the pool figures. idle: whether the worker is."""
        record: dict[str, Any] = {"dp_rank": self.dp_rank or 0} if self.server_args.dp_size > 1 else {}
        for state in hooks_of(self).state:
            record |= state()
        return record
