"""Memory for a request that is admitted or resumed: prefix locked, delta allocated, table written; or none of it.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_budget import AdmissionPlan
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["RequestMemory"]

logger = logging.getLogger(__name__)

# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


@dataclass
class _Given:
    """What a request has been given so far: the node locked for its prefix, and that prefix in parts; its delta, int64.

    generation: of the tree. row, window: whether it has its own. states: slots of a row that it has no more, int64.
    failed: whether something has raised; then it does without one large tensor.
    """

    generation: int
    node: TreeNode | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    delta: torch.Tensor | None = None
    row: bool = False
    window: bool = False
    states: list[torch.Tensor] = field(default_factory=list)
    failed: bool = False


class RequestMemory:
    """Gives requests what their plans say, out of the pools of one rank."""

    def __init__(self, tree: DecodeRadixCache, rows: Any, free_behind_windows: Callable[[], None]):
        """rows: the pool of requests' rows. free_behind_windows: frees of windows what no step attends to again."""
        self._tree, self._rows, self._free_behind_windows = tree, rows, free_behind_windows
        # Requests that could not get what was planned, and what each still has of it.
        self._failed: list[tuple[Req, _Given]] = []
        self._pools = (tree.pool,) if tree.windows is None else (tree.pool, tree.windows.pool)

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

    def give(self, req: Req, token_ids: Sequence[int], plan: AdmissionPlan, as_others: bool = False) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta and write the request's table.

        Raises what went wrong. Then nothing has been given, but for the step its prefix stays locked and its length its
        own: that may be so on this rank only, and what others of the step take by their plans is the same on all.

        as_others: other TP ranks give the request the same now, and have it back when it is released everywhere. After
        an error this rank tries once more; with what it then has the request is as on the others, and it raises still.
        """
        num_tokens, prefix_len = len(token_ids), plan.found.length
        given, error = _Given(self._tree.generation), None
        try:
            self._allocate(req, num_tokens, plan, given)
        except Exception as e:
            error = e
            if not as_others or not self._completes(req, num_tokens, plan, given):
                self._undo(req, num_tokens, given)
                raise
        # prefix_indices stays empty: to the engine, a prebuilt batch then starts at position 0 with nothing cached, so
        # it neither reads slots at an offset nor counts the prefix as prefill's hit.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = prefix_len
        if req.kv_generation is None:
            req.kv_generation = self._tree.generation
        req.last_node, req.cache_protected_len = given.node, prefix_len
        req.kv_allocated_len = req.kv_committed_len = num_tokens
        if error is not None:
            raise error

    def _allocate(self, req: Req, num_tokens: int, plan: AdmissionPlan, given: _Given) -> None:
        """Fill a row for ``num_tokens`` tokens of ``req``, with what it has not been ``given`` yet."""
        tree, rows = self._tree, self._rows
        if given.node is None:
            given.parts, given.node = tree.lock_prefix(plan.found)
        if given.delta is None:
            shortfall = plan.delta - tree.pool.available_size()
            if shortfall > 0:
                tree.evict_shortfall(shortfall)
            # The prefix ends with a page, so the rest is whole new pages, the last one used in part.
            given.delta = tree.pool.alloc_long_runs(plan.delta)
        if not given.row:
            given.row = rows.alloc([req]) is not None
        if given.delta is None or not given.row:
            raise RuntimeError(f"{req.rid}: admitted beyond what the pool has")
        if tree.windows is not None and not given.window:
            self._take_window(req, num_tokens, plan, given.delta)
            given.window = True
        slots = [*given.parts, given.delta]
        end = 0
        for part in slots if given.failed else [torch.cat(slots)]:
            part = part[: num_tokens - end]
            rows.write((req.req_pool_idx, slice(end, end + len(part))), part)
            end += len(part)

    def _completes(self, req: Req, num_tokens: int, plan: AdmissionPlan, given: _Given) -> bool:
        """Whether ``req`` has all it was to have after a second try.

        Else only this rank would have more memory, and others retract requests where it does not.
        """
        given.failed = True
        if not given.row and req.req_pool_idx is not None:
            # What came with it could not be had.
            self._rows.free(req)
        try:
            self._allocate(req, num_tokens, plan, given)
        except Exception as e:
            logger.error("Memory for request %s could not be had at a second try either", req.rid, exc_info=e)
            return False
        return True

    def _undo(self, req: Req, num_tokens: int, given: _Given) -> None:
        """Take back what ``req`` has been given, but for the lock of its prefix."""
        # First: to free the rest may take memory of a device that is full.
        self._failed.append((req, given))
        req.kv_allocated_len = num_tokens
        if req.req_pool_idx is not None:
            # Its slots may have come before what raised, with the row or not.
            given.states = [
                slots for slots in (req.mamba_pool_idx, req.mamba_ping_pong_track_buffer) if slots is not None
            ]
            req.mamba_pool_idx = req.mamba_ping_pong_track_buffer = None
            self._rows.free(req)
        error = self._take_back(given)
        if error is not None:
            logger.error(
                "Not all memory of request %s can be freed yet; each step tries again", req.rid, exc_info=error
            )

    def _take_back(self, given: _Given) -> Exception | None:
        """Free what is ``given`` beside row and lock, and forget what is free; returns what went wrong after that."""
        tree = self._tree
        try:
            if given.delta is not None:
                if given.window and tree.windows is not None:
                    tree.windows.drop(given.delta)
                    given.window = False
                tree.pool.free_or_keep(given.delta)
                given.delta = None
            while given.states:
                self._rows.mamba_pool.free(given.states[-1].reshape(-1))
                given.states.pop()
        except Exception as e:
            return e
        return None

    def end_step(self) -> None:
        """Nobody else is given anything in this step. What could not be freed yet is tried again."""
        if self._failed:
            failed, self._failed = self._failed, []
            for req, given in failed:
                self._end(req, given)
        for pool in self._pools:
            if pool.unfreed:
                pool.free_unfreed()

    def _end(self, req: Req, given: _Given) -> None:
        if given.generation != self._tree.generation:
            # A flush has freed it all.
            return
        node, given.node = given.node, None
        req.kv_allocated_len = 0
        if node is not None:
            self._tree.dec_lock_ref(node)
        if self._take_back(given) is not None:
            self._failed.append((req, given))

    def _take_window(self, req: Req, num_tokens: int, plan: AdmissionPlan, delta: torch.Tensor) -> None:
        """Give the end of ``delta`` slots of the window pool. The prefix ends where the window begins, or before."""
        windows = self._tree.windows
        assert windows is not None
        if plan.window.now > windows.available_size():
            self._free_behind_windows()
        start = windows.rule.start(num_tokens)
        windows.take(delta[start - plan.found.length :], num_tokens - start)
        req.swa_evicted_seqlen = start
