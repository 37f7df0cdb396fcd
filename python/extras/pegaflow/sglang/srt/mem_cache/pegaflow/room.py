"""Capacity of the KV pool that loads from a PegaFlow server and saves to it must leave to live requests.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.mem_cache.prefix_reader import tokens_above

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.pegaflow.tree import PegaFlowTree
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["NOBODY", "Live", "Room", "live_on_decode", "live_on_scheduler"]

# Output tokens, at most, for which a request must find memory: the engine's own bound.
MOST_NEW_TOKENS = 4096


class Live(NamedTuple):
    """The requests that hold KV.

    running: the engine retracts these if memory runs out. moving: will run; not retracted before that. ended: only
    hold what they have. growth: tokens that admission reserves for their next steps. chunks: tokens that a partly
    computed prompt still takes, for which no request is retracted.
    """

    running: Sequence[Req] = ()
    moving: Sequence[Req] = ()
    ended: Sequence[Req] = ()
    growth: int = 0
    chunks: int = 0


NOBODY = Live()


class Room:
    """Capacity of the pool for loads and saves in one step; only the server can end these.

    Each request must be able to finish after all running requests beside it have been retracted. A load must also
    leave what admission reserves for running requests.
    """

    def __init__(self, tree: PegaFlowTree, live: Live) -> None:
        self.tree, self.live = tree, live
        page = self.page = tree.page_size
        size = tree.token_to_kv_pool_allocator.size
        # Nodes that stay locked, and the rest of the pool.
        self.fixed: set[TreeNode] = set()
        self.left = size - tree.unreturned_tokens
        for req in (*live.moving, *live.ended):
            self.left -= pages(req.kv_allocated_len, page) * page - req.cache_protected_len
            self.left -= tokens_above((req.last_node,), self.fixed)
        for node in tree.nodes_in_use():
            self.left -= tokens_above((node,), self.fixed)
        # Tokens that moving requests still take; whole length of running ones, which may start again.
        self.rest = max((self._length(req) - self._allocated(req) for req in live.moving), default=0)
        self.lengths = [(self._length(req), req) for req in live.running]

    def _allocated(self, req: Req) -> int:
        return pages(req.kv_allocated_len, self.page) * self.page

    def _length(self, req: Req) -> int:
        length = len(req.origin_input_ids) + len(req.output_ids) + _new_tokens(req)
        return pages(length, self.page) * self.page

    def take(self, node: TreeNode, tokens: int = 0) -> bool:
        """Whether ``node`` may be locked, for a save or a load of ``tokens`` tokens; if so, both are deducted."""
        tree, live = self.tree, self.live
        path: set[TreeNode] = set()
        unlocked, above = tokens, node
        while above.parent is not None:
            unlocked += len(above.key) if above.lock_ref == 0 else 0
            if above not in self.fixed:
                path.add(above)
            above = above.parent
        free = tree.token_to_kv_pool_allocator.available_size() + tree.evictable_size() - unlocked
        left = self.left - tokens - sum(len(one.key) for one in path)
        if free < (max(live.growth, live.chunks) if tokens else live.chunks) or self.rest > left:
            return False
        fixed = self.fixed | path
        # Tokens of a request in nodes that stay locked need no further memory.
        if any(length > left and length - self._common(req, fixed) > left for length, req in self.lengths):
            return False
        self.fixed, self.left = fixed, left
        return True

    @staticmethod
    def _common(req: Req, fixed: set[TreeNode]) -> int:
        node, tokens = req.last_node, 0
        while node.parent is not None:
            tokens += len(node.key) if node in fixed else 0
            node = node.parent
        return tokens


def live_on_decode(live: LiveReqs, growth: Callable[[LiveReqs], int]) -> Live:
    """Of a decode worker with a radix cache. growth: what admission reserves for the next steps of these requests."""
    moving = [req for req in live.coming if _holds(req)]
    ended = [req for req in live.quarantined if _holds(req)]
    return Live(live.running, moving, ended, growth(live))


def live_on_scheduler(scheduler: Scheduler) -> Live:
    """Of an aggregated server or a prefill worker."""
    page, chunked, last = scheduler.page_size, scheduler.chunked_req, scheduler.last_batch
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    computed = last.reqs if last is not None and last.forward_mode.is_extend() else []
    known = {id(req) for req in running}
    coming = (*computed, chunked) if chunked is not None else computed
    moving = {id(req): req for req in coming if id(req) not in known and _holds(req)}
    sent = getattr(scheduler, "disagg_prefill_inflight_queue", None) or ()
    ended = [req for req in sent if id(req) not in moving and _holds(req)]
    chunks = 0
    if chunked is not None:
        # One page more, as the engine.
        whole = len(chunked.origin_input_ids) + len(chunked.output_ids)
        chunks = (pages(max(0, whole - chunked.kv_allocated_len), page) + 1) * page
    new = sum(_new_tokens(req) for req in (*running, *moving.values()))
    return Live(running, [*moving.values()], ended, int(new * scheduler.new_token_ratio) + chunks, chunks)


def _holds(req: Req) -> bool:
    """Whether it holds KV: requests that failed early never got any, and ended ones have released it."""
    return req.req_pool_idx is not None


def _new_tokens(req: Req) -> int:
    return min(max(0, req.sampling_params.max_new_tokens - len(req.output_ids)), MOST_NEW_TOKENS)
