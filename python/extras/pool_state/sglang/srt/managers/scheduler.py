"""Scheduler that tells what its pools hold.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.decode_radix.hooks import hooks_of
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.kv_pool_state import Pools

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Tells in ``kv_pool`` the pool figures of invariant I1, in tokens where one pool has all KV."""

    def pools(self) -> Pools:
        """This worker's pools as they are now."""
        return Pools(
            tree=self.tree_cache,
            allocator=self.token_to_kv_pool_allocator,
            rows=getattr(self, "req_to_token_pool", None),
            size=self.max_total_num_tokens,
            buffers=getattr(self, "req_to_metadata_buffer_idx_allocator", None),
        )

    def kv_pool_state(self) -> dict[str, Any]:
        """What ``kv_pool`` says."""
        idle = self.rests()
        return self.pools().state(idle, self.pool_record(idle), self.kv_manager())

    def pool_record(self, idle: bool) -> dict[str, Any]:
        """What it says beside the figures of the pools, of a worker that is ``idle`` or not."""
        record: dict[str, Any] = {"dp_rank": self.dp_rank or 0} if self.server_args.dp_size > 1 else {}
        for state in hooks_of(self).state:
            record |= state()
        return record
