"""Memory for a request that is admitted or resumed: prefix locked, delta allocated, table written; or none of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_budget import AdmissionPlan
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["RequestMemory"]

# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


class RequestMemory:
    """Gives requests what their plans say, out of the pools of one rank."""

    def __init__(self, tree: DecodeRadixCache, rows: Any, free_behind_windows: Callable[[], None]):
        """rows: the pool of requests' rows. free_behind_windows: frees of windows what no step attends to again."""
        self._tree, self._rows, self._free_behind_windows = tree, rows, free_behind_windows
        # Requests of this step that could not get what was planned, and the node that is locked for each.
        self._failed: list[tuple[Req, TreeNode]] = []

    @property
    def rows(self) -> Any:
        """The pool of requests' rows."""
        return self._rows

    def figures(self) -> list[int]:
        """Figures of this rank's memory by which it decides: KV, windows, evictable, rows, and those of host memory."""
        tree = self._tree
        windows = 0 if tree.windows is None else tree.windows.available_size()
        host = [] if tree.tier is None else tree.tier.figures()
        return [tree.pool.available_size(), windows, tree.evictable_size(), self._rows.available_size(), *host]

    def give(self, req: Req, token_ids: Sequence[int], plan: AdmissionPlan) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta and write the request's table.

        Raises what went wrong. Then nothing has been given, but for the step its prefix stays locked and its length its
        own: that may be so on this rank only, and what others of the step take by their plans is the same on all.
        """
        num_tokens, prefix_len = len(token_ids), plan.found.length
        node = self._allocate(req, num_tokens, plan)
        # prefix_indices stays empty: to the engine, a prebuilt batch then starts at position 0 with nothing cached, so
        # it neither reads slots at an offset nor counts the prefix as prefill's hit.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = prefix_len
        if req.kv_generation is None:
            req.kv_generation = self._tree.generation
        req.last_node, req.cache_protected_len = node, prefix_len
        req.kv_allocated_len = req.kv_committed_len = num_tokens
        req.fill_ids = req.origin_input_ids + req.output_ids
        req.set_extend_input_len(len(req.fill_ids))

    def _allocate(self, req: Req, num_tokens: int, plan: AdmissionPlan) -> TreeNode:
        """Fill a row for ``num_tokens`` tokens of ``req``; returns the node of the tree that is locked for it."""
        tree, rows, prefix_len = self._tree, self._rows, plan.found.length
        parts, node = tree.lock_prefix(plan.found)
        delta = slots = None
        try:
            shortfall = plan.delta - tree.pool.available_size()
            if shortfall > 0:
                tree.evict_shortfall(shortfall)
            # The prefix ends with a page, so the rest is whole new pages, the last one used in part.
            delta = tree.pool.alloc_long_runs(plan.delta)
            slots = rows.alloc([req])
            if tree.windows is not None and delta is not None:
                self._take_window(req, num_tokens, plan, delta)
            assert delta is not None and slots is not None, f"{req.rid}: admitted beyond what the pool has"
            kv_loc = torch.cat([*parts, delta])
            if prefix_len + plan.delta > num_tokens:
                kv_loc = kv_loc[:num_tokens]
            rows.write((req.req_pool_idx, slice(0, num_tokens)), kv_loc)
        except Exception:
            if slots is not None:
                self._free_row(req)
            if delta is not None:
                # With its window, if it has got one.
                tree.token_to_kv_pool_allocator.free(delta)
            self._failed.append((req, node))
            req.kv_allocated_len = num_tokens
            raise
        return node

    def end_step(self) -> None:
        """Nobody else is given anything in this step."""
        for req, node in self._failed:
            self._tree.dec_lock_ref(node)
            req.kv_allocated_len = 0
        self._failed.clear()

    def _take_window(self, req: Req, num_tokens: int, plan: AdmissionPlan, delta: torch.Tensor) -> None:
        """Give the end of ``delta`` slots of the window pool. The prefix ends where the window begins, or before."""
        windows = self._tree.windows
        assert windows is not None
        if plan.window.now > windows.available_size():
            self._free_behind_windows()
        start = windows.rule.start(num_tokens)
        windows.take(delta[start - plan.found.length :], num_tokens - start)
        req.swa_evicted_seqlen = start

    def _free_row(self, req: Req) -> None:
        """Give back a request's row, and its state slot if it has one."""
        if req.mamba_pool_idx is not None:
            self._rows.free_mamba_cache(req)
        self._rows.free(req)
