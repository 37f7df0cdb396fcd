"""Memory for a request that is admitted or resumed: prefix locked, delta allocated, table written.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["RequestMemory"]

# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


class RequestMemory:
    """Gives requests what their plans say, out of the pools of one rank.

    What raises in it ends the worker: the plan was to fit, and other TP ranks go on as if this one had the memory.
    """

    def __init__(self, tree: DecodeRadixCache, rows: Any):
        """rows: the pool of requests' rows."""
        self._tree, self._rows = tree, rows

    @property
    def rows(self) -> Any:
        """The pool of requests' rows."""
        return self._rows

    def figures(self) -> list[int]:
        """Figures of this rank's memory by which it decides: KV, beside, evictable, rows, and those of host memory."""
        tree = self._tree
        return [
            tree.pool.available_size(),
            tree.state.available(),
            tree.evictable_size(),
            self._rows.available_size(),
            *tree.tier.figures(),
        ]

    def give(self, req: Req, token_ids: Sequence[int], plan: AdmissionPlan) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta and write the request's table."""
        tree, rows, num_tokens = self._tree, self._rows, len(token_ids)
        parts, req.last_node = tree.lock_prefix(plan.found)
        shortfall = plan.delta - tree.pool.available_size()
        if shortfall > 0:
            tree.evict_shortfall(shortfall)
        # The prefix ends with a page, so the rest is whole new pages, the last one used in part.
        delta = tree.alloc_delta(plan.delta)
        if delta is None or rows.alloc([req]) is None:
            raise RuntimeError(f"{req.rid}: admitted beyond what the pool has")
        tree.state.take(req, num_tokens, plan, delta)
        rows.write((req.req_pool_idx, slice(0, num_tokens)), torch.cat([*parts, delta])[:num_tokens])
        # prefix_indices stays empty: to the engine, a prebuilt batch then starts at position 0 with nothing cached, so
        # it neither reads slots at an offset nor counts the prefix as prefill's hit.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = req.cache_protected_len = plan.found.length
        if req.kv_generation is None:
            req.kv_generation = tree.generation
        req.kv_allocated_len = req.kv_committed_len = num_tokens
