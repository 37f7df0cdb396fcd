"""A scheduler whose tree saves to a PegaFlow server and loads from it.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import uuid

from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache.decode_radix_cache import check_pool
from sglang.srt.mem_cache.kv_namespace import kv_namespace
from sglang.srt.mem_cache.page_names import rank_namespace
from sglang.srt.mem_cache.pegaflow.memory import kv_layout
from sglang.srt.mem_cache.pegaflow.room import live_on_scheduler
from sglang.srt.mem_cache.pegaflow.session import PegaFlowSession
from sglang.srt.mem_cache.pegaflow.tree import PegaFlowDecodeRadixCache, PegaFlowRadixCache, PegaFlowTree
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.state_kind import kind_of

logger = logging.getLogger(__name__)

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """What `--enable-pegaflow` adds to a scheduler; without it, every method is the one below."""

    def takes_decode_tree(self) -> bool:
        """It takes another one."""
        return super().takes_decode_tree() and not self.server_args.enable_pegaflow

    def init_cache_with_memory_pool(self) -> None:
        """Puts a tree in place that saves to the PegaFlow server and loads from it. Raises ValueError."""
        super().init_cache_with_memory_pool()
        args = self.server_args
        if not args.enable_pegaflow:
            return
        if type(self.tree_cache) is not RadixCache:
            raise ValueError(
                "--enable-pegaflow is not verified for this model: the engine chose "
                f"{type(self.tree_cache).__name__} for it, and only full-attention models (RadixCache) are. "
                "Leave the flag out."
            )
        layout = kv_layout(self.token_to_kv_pool_allocator.get_kvcache(), self.page_size)
        tree = PegaFlowDecodeRadixCache if args.disaggregation_decode_enable_radix_cache else PegaFlowRadixCache
        self.tree_cache = tree.take_over(self.tree_cache)
        if args.disaggregation_decode_enable_radix_cache:
            kind = kind_of(self.tp_worker.model_runner)
            check_pool(kind, self.tp_worker.model_runner)
            self.tree_cache.state = kind.beside(self.tree_cache)
        rank = None if layout.shared else self.tp_rank
        session = PegaFlowSession(
            args.pegaflow_endpoint,
            f"sglang-{uuid.uuid4().hex}-{self.tp_rank}",
            rank_namespace(kv_namespace(args), layout.describe(), rank, self.tp_size),
            layout,
        )
        # Of what all ranks hold alike, one saves all.
        saves = not layout.shared or self.tp_rank == 0
        self.tree_cache.attach(session, self.tp_cpu_group if self.tp_size > 1 else None, saves)
        # On decode, the queue of requests that wait for memory sets its own.
        self.tree_cache.live = lambda: live_on_scheduler(self)
        # The engine's own hooks for prefixes that come from elsewhere: asked of the tree at each of their turns.
        self.enable_hicache_storage = True

    @property
    def pegaflow(self) -> PegaFlowTree | None:
        """The tree, if it uses a PegaFlow server."""
        return self.tree_cache if isinstance(self.tree_cache, PegaFlowTree) else None

    def get_internal_state(self, recv_req):
        """Adds what the server has been asked and given, under ``pegaflow``."""
        output = super().get_internal_state(recv_req)
        if self.pegaflow is not None:
            output.internal_state = {**output.internal_state, "pegaflow": self.pegaflow.pegaflow_state()}
        return output

    def _prefetch_kvcache(self, req) -> None:
        """Has PegaFlow asked for the prompt, where the engine asks its hierarchical cache."""
        if self.pegaflow is None:
            super()._prefetch_kvcache(req)
            return
        # As in a match: one token must be left to compute.
        end = len(req.origin_input_ids) + len(req.output_ids) - 1
        if req.return_logprob and req.logprob_start_len >= 0:
            end = min(end, req.logprob_start_len)
        tokens = (req.origin_input_ids + req.output_ids)[: max(end, 0)]
        self.pegaflow.prefetch(req.rid, tokens, req.extra_key, req.priority or 0)

    def process_input_requests(self, recv_reqs) -> None:
        """Adds, once per turn of every event loop, what PegaFlow has done."""
        super().process_input_requests(recv_reqs)
        if self.pegaflow is not None and self.pegaflow.advance():
            # Only the end of a running request has the engine look again at those that found no room, and none may run.
            self.running_batch.batch_is_full = False

    def _get_storage_backend_type(self) -> str:
        """Names PegaFlow, where the engine looks for the backend of its hierarchical cache."""
        return super()._get_storage_backend_type() if self.pegaflow is None else "pegaflow"

    def flush_cache(self) -> bool:
        """Waits some seconds for pages that a server saves or loads; after that they stay with it."""
        tree = self.pegaflow
        if tree is None:
            return super().flush_cache()
        self.end_step_of_none()
        if self.is_fully_idle() and not tree.drain():
            logger.warning("A flush does not wait for the PegaFlow server any longer; it keeps the pages that it uses.")
            tree.fence()
        done = super().flush_cache()
        if done:
            tree.keep_fenced()
        return done
