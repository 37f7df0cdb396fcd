"""A decode worker without a server, for benchmarks and unit tests: the real queues, tree, allocator and pools.

What lies outside the worker is left to its user: the network and the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.decode import (
    DecodePreallocQueue,
    DecodeReqToTokenPool,
    DecodeTransferQueue,
    HybridMambaDecodeReqToTokenPool,
)
from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator, TransferBackend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool, SWATokenToKVPoolAllocator
from sglang.srt.server_args import set_global_server_args_for_scheduler


class Queue(DecodePreallocQueue):
    """The real queue without a network."""

    def _init_kv_manager(self):
        return None


def make_allocator(
    size: int, page_size: int, kv: MHATokenToKVPool | None = None
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """An allocator of ``size`` tokens. Without ``kv``, slots are numbers only and there is no memory behind them."""
    kv = kv or MHATokenToKVPool(page_size, page_size, torch.float32, 1, 1, 1, "cpu", False)
    if page_size == 1:
        return TokenToKVPoolAllocator(size, torch.float32, "cpu", kv, need_sort=True)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", kv, need_sort=True)


def make_window_pool(size: int, windows: int, page_size: int) -> SWAKVPool:
    """A pool of ``size`` tokens for one layer with full attention, and of ``windows`` for one with a window."""
    return SWAKVPool(size, windows, page_size, torch.float32, 1, 1, [1], [0], False, "cpu")


def make_state_pool(max_reqs: int, max_len: int, states: int) -> HybridMambaDecodeReqToTokenPool:
    """Rows for ``max_reqs`` running requests and as many more, and ``states`` slots; a state is two float32 numbers."""
    one = SimpleNamespace(conv=[(1, 1)], temporal=(1, 1, 1))
    kinds = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
    return HybridMambaDecodeReqToTokenPool(
        max_reqs,
        max_len,
        "cpu",
        False,
        cache_params=SimpleNamespace(shape=one, dtype=kinds),
        mamba_layer_ids=[0],
        speculative_num_draft_tokens=None,
        enable_mamba_extra_buffer=False,
        pre_alloc_size=max_reqs,
        enable_overlap_schedule=True,
        mamba_size=states,
    )


def alone() -> dist.ProcessGroup:
    """The group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def server_args(page_size: int, options: Mapping[str, Any]) -> SimpleNamespace:
    """The server's arguments that a decode worker's queues look at."""
    return SimpleNamespace(
        dp_size=1,
        page_size=page_size,
        speculative_algorithm=None,
        enable_metrics=False,
        served_model_name="m",
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        **{
            "chunked_prefill_size": 8192,
            "max_prefill_tokens": 16384,
            "disaggregation_decode_admission": "prefix",
            "disaggregation_decode_local_prefill": "off",
            "disaggregation_decode_itl_target": None,
            "disaggregation_decode_ttft_target": None,
            "disaggregation_decode_max_overtaken": 32,
            "enable_lora": False,
            **options,
        },
    )


class DecodeWorker:
    """One decode rank with pages of ``page_size`` tokens and a pool of ``size`` tokens.

    max_reqs: requests that run at a time, and as many more that are preallocated, each of at most ``max_len`` tokens.
    reserved: tokens kept for each request's answer. watermark: tokens kept free, None for the default part of the pool.
    tree_type: the engine's ``ChunkCache`` makes it a worker without the flag. options: more arguments of the server.
    states: slots for the states of a hybrid model's requests; None for a model without. windows: of a model with
    sliding windows, the tokens of one and of the pool for them; ``kv`` is then of `make_window_pool`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        *,
        max_reqs: int,
        max_len: int,
        reserved: int,
        watermark: int | None = None,
        kv: MHATokenToKVPool | SWAKVPool | None = None,
        group: dist.ProcessGroup | None = None,
        queue_type: type[Queue] = Queue,
        tree_type: type[BasePrefixCache] = DecodeRadixCache,
        options: Mapping[str, Any] | None = None,
        states: int | None = None,
        windows: tuple[int, int] | None = None,
    ):
        group = group or alone()
        self.size, self.page_size, self.group = size, page_size, group
        args = server_args(page_size, options or {})
        set_global_server_args_for_scheduler(args)
        window_tokens = windows[1] if windows else size
        if states is None:
            self.pool = DecodeReqToTokenPool(max_reqs, max_len, "cpu", False, pre_alloc_size=max_reqs)
        else:
            self.pool = make_state_pool(max_reqs, max_len, states)
        self._make_tree(kv, tree_type, states is not None, windows)
        if watermark is not None:
            self.tree.watermark = watermark
        self.meta = MetadataBuffers(2 * max_reqs, hidden_size=16, hidden_states_dtype=torch.float32)
        self.meta_alloc = ReqToMetadataIdxAllocator(2 * max_reqs)
        self.streamed: list[Req] = []
        self.scheduler = self._scheduler_stand_in(args, windows is not None, window_tokens)
        self.transfer = DecodeTransferQueue(group, self.meta_alloc, 0, self.meta, self.scheduler, self.tree)
        self.queue = queue_type(
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            draft_token_to_kv_pool=None,
            req_to_metadata_buffer_idx_allocator=self.meta_alloc,
            metadata_buffers=self.meta,
            scheduler=self.scheduler,
            transfer_queue=self.transfer,
            tree_cache=self.tree,
            gloo_group=group,
            tp_rank=0,
            tp_size=1,
            dp_size=1,
            gpu_id=0,
            bootstrap_port=0,
            max_total_num_tokens=size,
            pp_rank=0,
            num_reserved_decode_tokens=reserved,
            transfer_backend=TransferBackend.NIXL,
        )

    def _make_tree(
        self, kv: Any, tree_type: type[BasePrefixCache], has_states: bool, windows: tuple[int, int] | None
    ) -> None:
        page_size = self.page_size
        if windows is None:
            self.allocator = make_allocator(self.size, page_size, kv)
        else:
            kv = kv or make_window_pool(page_size, page_size, page_size)
            self.allocator = SWATokenToKVPoolAllocator(
                self.size, windows[1], page_size, torch.float32, "cpu", kv, need_sort=True
            )
            if tree_type is DecodeRadixCache:
                # Of an extra.
                from sglang.srt.mem_cache.window_radix_cache import WindowRadixCache

                tree_type = WindowRadixCache
        self.tree = tree_type(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                sliding_window_size=windows[0] if windows else None,
            )
        )
        if has_states and isinstance(self.tree, DecodeRadixCache):
            from sglang.srt.mem_cache.state_slots import StateSlots

            self.tree.state = StateSlots(self.pool)

    def _scheduler_stand_in(self, args: SimpleNamespace, has_windows: bool, window_tokens: int) -> SimpleNamespace:
        """What the queues ask of a scheduler."""
        return SimpleNamespace(
            server_args=args,
            tp_worker=SimpleNamespace(
                is_hybrid_swa=has_windows,
                model_runner=SimpleNamespace(swa_max_total_num_tokens=window_tokens),
            ),
            running_batch=ScheduleBatch([], self.pool, self.allocator, self.tree),
            waiting_queue=[],
            max_running_requests=self.pool.size,
            enable_lora=False,
            last_batch=None,
            enable_metrics=False,
            enable_hisparse=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            dp_rank=None,
            # Of several: there is no prefill that the first would tell of what is computed here.
            attn_tp_rank=1,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            stream_output=lambda reqs, _: self.streamed.extend(reqs),
        )

    @property
    def running(self) -> list[Req]:
        """The requests that decode."""
        return self.scheduler.running_batch.reqs

    @property
    def waiting(self) -> list[Req]:
        """The requests whose KV has come and that do not decode yet."""
        return self.scheduler.waiting_queue
