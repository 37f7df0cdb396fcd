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
    """Scheduler that uses PegaFlow with `--enable-pegaflow`, and is unchanged without it."""

    def takes_decode_tree(self) -> bool:
        """False with PegaFlow, which has its own decode tree."""
        return super().takes_decode_tree() and not self.server_args.enable_pegaflow

    def init_cache_with_memory_pool(self) -> None:
        """Replaces the tree by one that saves to the PegaFlow server and loads from it. Raises ValueError."""
        super().init_cache_with_memory_pool()
        args = self.server_args
        if not args.enable_pegaflow:
            return
        if type(self.tree_cache) is not RadixCache:
            raise ValueError(
                "--enable-pegaflow is not verified for this model: the engine chose "
                f"{type(self.tree_cache).__name__} for it, and supports only RadixCache (full attention). "
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
        # If all ranks hold the same KV, rank 0 saves it.
        saves = not layout.shared or self.tp_rank == 0
        self.tree_cache.attach(session, self.tp_cpu_group if self.tp_size > 1 else None, saves)
        # On decode, the queue of requests that wait for memory sets its own.
        self.tree_cache.live = lambda: live_on_scheduler(self)
        # Enables the engine's hooks for prefetched prefixes; the tree answers them.
        self.enable_hicache_storage = True

    @property
    def pegaflow(self) -> PegaFlowTree | None:
        """The tree, if it uses a PegaFlow server."""
        return self.tree_cache if isinstance(self.tree_cache, PegaFlowTree) else None

    def get_internal_state(self, recv_req):
        """Adds PegaFlow's figures under ``pegaflow``."""
        output = super().get_internal_state(recv_req)
        if self.pegaflow is not None:
            output.internal_state = {**output.internal_state, "pegaflow": self.pegaflow.pegaflow_state()}
        return output

    def _prefetch_kvcache(self, req) -> None:
        """Looks up the prompt in PegaFlow where the engine would in its hierarchical cache."""
        if self.pegaflow is None:
            super()._prefetch_kvcache(req)
            return
        # As in a match, one token must be left to compute.
        end = len(req.origin_input_ids) + len(req.output_ids) - 1
        if req.return_logprob and req.logprob_start_len >= 0:
            end = min(end, req.logprob_start_len)
        tokens = (req.origin_input_ids + req.output_ids)[: max(end, 0)]
        self.pegaflow.prefetch(req.rid, tokens, req.extra_key, req.priority or 0)

    def process_input_requests(self, recv_reqs) -> None:
        """Applies PegaFlow's results once per iteration of every event loop."""
        super().process_input_requests(recv_reqs)
        if self.pegaflow is not None and self.pegaflow.advance():
            # The engine retries requests without memory only when a running request ends, and none may be running.
            self.running_batch.batch_is_full = False

    def _get_storage_backend_type(self) -> str:
        """Reports PegaFlow where the engine looks for its hierarchical cache's backend."""
        return super()._get_storage_backend_type() if self.pegaflow is None else "pegaflow"

    def flush_cache(self) -> bool:
        """Waits some seconds for running saves and loads; after that their pages stay reserved for the server."""
        tree = self.pegaflow
        if tree is None:
            return super().flush_cache()
        self.end_step_of_none()
        if self.is_fully_idle() and not tree.drain():
            logger.warning("A flush stopped waiting for the PegaFlow server; pages in use by it stay reserved.")
            tree.fence()
        done = super().flush_cache()
        if done:
            tree.keep_fenced()
        return done
