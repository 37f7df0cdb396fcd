"""Memory for an admitted or resumed request: lock the prefix, allocate the delta, write the slot.

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
    """Gives requests the memory of their plans from the pools of one rank.

    An exception ends the worker: the plan was to fit, and other TP ranks go on as if it had.
    """

    def __init__(self, tree: DecodeRadixCache, rows: Any):
        """rows: the req_to_token pool."""
        self._tree, self.rows = tree, rows

    def figures(self) -> list[int]:
        """This rank's KV, pool beside it, evictable tokens, req_to_token slots, and the tier's."""
        tree = self._tree
        return [
            tree.pool.available_size(),
            tree.state.available(),
            tree.evictable_size(),
            self.rows.available_size(),
            *tree.tier.figures(),
        ]

    def give(self, req: Req, token_ids: Sequence[int], plan: AdmissionPlan) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta, write the req_to_token slot."""
        tree, rows, num_tokens = self._tree, self.rows, len(token_ids)
        parts, req.last_node = tree.lock_prefix(plan.found)
        shortfall = plan.delta - tree.pool.available_size()
        if shortfall > 0:
            tree.evict_shortfall(shortfall)
        # The prefix ends with a page, so the delta is whole pages, the last one partly used.
        delta = tree.alloc_delta(plan.delta)
        if delta is None or rows.alloc([req]) is None:
            raise RuntimeError(f"{req.rid}: admitted beyond what the pool has")
        tree.state.take(req, num_tokens, plan, delta)
        rows.write(
            (req.req_pool_idx, slice(0, num_tokens)), torch.cat([*parts, delta])[:num_tokens]
        )
        # Empty: the engine then starts the prebuilt batch at position 0 with nothing cached. It
        # reads no slots at an offset, and does not count the prefix as a hit of prefill.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = req.cache_protected_len = plan.found.length
        if req.kv_generation is None:
            req.kv_generation = tree.generation
        req.kv_allocated_len = req.kv_committed_len = num_tokens
