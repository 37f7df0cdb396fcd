"""The engine's ``triton`` backend with decode steps that read shared prefixes once.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, logit_capping_mod
from sglang.srt.layers.attention.triton_ops import decode_attention as engine_kernels
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton

from sglang_pd_radix.supplied.shared_prefix.levels import Costs, LayerShape

from . import triton_kernels
from .option import is_windowed
from .running_groups import RunningGroups
from .triton_plan import HEADER, PARTS, SharedPlan, levels_within, make_plan, make_tiling, nothing_shared

# Fitted on an H100: docs/evidence.md#h100-2026-11-23.
#: Bytes per nanosecond that a GPU reads in attention.
BANDWIDTH = 2800.0
#: Nanoseconds per byte of a partial result, written by one kernel and read by another.
PARTIAL = 0.0085
#: Additional nanoseconds of a layer's step with shared pieces, independent of their size.
CALL = 8200.0
#: Start of a piece: 5 us on one of a hundred processors, as time of all of them. Estimated. Multiplications are the
#: same with and without sharing, so the choice does not depend on them.
PIECE = 50.0


def costs_of(heads: int, value_dim: int) -> Costs:
    """The costs of a layer with ``heads`` heads on this rank and ``value_dim`` numbers per value."""
    return Costs(byte=1 / BANDWIDTH, product=0, score=0, piece=PIECE, query=heads * (value_dim + 1) * 4 * PARTIAL)


def attention_layers(runner: Any) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


@dataclass(frozen=True)
class Launch:
    """Arguments of a step's layers: items, at most, and memory for partial results."""

    items: int
    parts: torch.Tensor
    weights: torch.Tensor


class SharedPrefixTritonBackend(TritonAttnBackend):
    """Attends to shared pieces with all their queries at once, and to each request's own part with the engine's
    kernel; a further kernel merges both. Everything else is the engine's.

    The engine's metadata of a decode step (``kv_indptr``, ``kv_indices``, ``num_kv_splits``) is reduced to the own
    parts. The plan is an array on the device, rewritten when the batch or its shared prefixes change. A CUDA graph is
    captured with both at fixed addresses, so it serves every plan, including the empty one.
    """

    # Read by the ITL target: a shared prefix is read once in a step.
    shares_prefixes = True

    def __init__(self, runner: Any, layers: Sequence[Any]) -> None:
        super().__init__(runner)
        layer = next(layer for layer in layers if not is_windowed(layer))
        pool = runner.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        key_dim, value_dim = keys.shape[-1], values.shape[-1]
        token_bytes = kv_heads * (key_dim + value_dim) * keys.element_size()
        self._shape = LayerShape(heads=heads, kv_heads=kv_heads, dims=key_dim + value_dim, kv_bytes=token_bytes)
        self._costs = costs_of(heads, value_dim)
        self._tiling = make_tiling(
            heads // kv_heads, kv_heads, max(key_dim, value_dim), keys.element_size(), self.device_core_count
        )
        self._partial = (heads, value_dim)
        self.groups = RunningGroups(runner.req_to_token_pool, pool.page_size)
        # Read by ForwardBatch.init_new.
        runner.running_groups = self.groups

        self._capacity = runner.req_to_token_pool.size
        most = PARTS * self._capacity
        self._array = torch.zeros(
            HEADER + 2 * self._capacity + 1 + 2 * most + 6 * self._tiling.most_items(most),
            dtype=torch.int32,
            device=self.device,
        )
        self._begins = self._array[HEADER : HEADER + self._capacity]
        self._nothing = nothing_shared()
        self._plan = self._on_device = self._nothing
        self._memory = self._new_memory(0)
        # Used by captured graphs, so its address is fixed.
        self._graph_memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self._launch: Launch | None = None

    def _new_memory(self, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads, value_dim = self._partial
        shape = {"dtype": torch.float32, "device": self.device}
        return torch.empty((parts, heads, value_dim), **shape), torch.empty((parts, heads), **shape)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Adds the plan of a decode step with shared prefixes."""
        super().init_forward_metadata(forward_batch)
        self._launch = None
        batch = self.groups.take()
        if batch is None or not forward_batch.forward_mode.is_decode() or len(batch[0]) != forward_batch.batch_size:
            return
        plan = self._next_plan(*batch)
        if plan is self._nothing:
            return
        self._put(plan)
        metadata = self.forward_metadata
        self._read_own_parts(
            forward_batch.batch_size,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            metadata.kv_indices,
            metadata.num_kv_splits,
        )
        parts = len(plan.queries)
        if len(self._memory[0]) < parts:
            self._memory = self._new_memory(parts)
        self._launch = Launch(len(plan.items), *self._memory)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Adds memory for the partial results of a batch of this size."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        self._graph_memory = self._new_memory(PARTS * max_bs)

    def init_forward_metadata_capture_cuda_graph(self, bs: int, *args: Any, **kwargs: Any) -> None:
        """Adds the plan, which a graph reads at its replay. A single request shares nothing."""
        super().init_forward_metadata_capture_cuda_graph(bs, *args, **kwargs)
        self._launch = None
        if bs > 1 and self._graph_memory is not None:
            self._put(self._nothing)
            self._launch = Launch(self._tiling.most_items(PARTS * bs), *self._graph_memory)

    def init_forward_metadata_replay_cuda_graph(
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the batch's plan. The engine's padding shares nothing."""
        super().init_forward_metadata_replay_cuda_graph(bs, req_pool_indices, seq_lens, *args, **kwargs)
        batch = self.groups.take()
        plan = self._nothing if batch is None or bs == 1 else self._next_plan(*batch)
        self._put(plan)
        if plan is not self._nothing:
            self._read_own_parts(
                bs, req_pool_indices, seq_lens, self.cuda_graph_kv_indices, self.cuda_graph_num_kv_splits[:bs]
            )

    def _next_plan(self, rows: list[int], lens: list[int]) -> SharedPlan:
        if self.groups.follow(rows, lens):
            most = PARTS * len(rows)
            levels = levels_within(self.groups.prefixes, self._shape, self._costs, most)
            plan = make_plan(levels, rows, self._tiling, most) if levels else self._nothing
            self._plan = plan if plan.gain(self._shape, self._costs) > CALL else self._nothing
        return self._plan

    def _put(self, plan: SharedPlan) -> None:
        """Copy a plan to the device, in stream order, without waiting."""
        if plan is self._on_device:
            return
        packed = torch.from_numpy(plan.packed(self._capacity))
        if self._array.is_cuda:
            # torch keeps pinned memory until the copies out of it have ended.
            packed = packed.pin_memory()
        self._array[: len(packed)].copy_(packed, non_blocking=True)
        self._on_device = plan

    def _read_own_parts(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        kv_indices: torch.Tensor,
        num_kv_splits: torch.Tensor,
    ) -> None:
        """Reduce the engine's metadata to the own parts, on the device."""
        begins = self._begins[:bs]
        lens = seq_lens[:bs] - begins
        self.kv_indptr[1 : bs + 1] = torch.cumsum(lens, dim=0)
        create_flashinfer_kv_indices_triton[(bs,)](
            self.req_to_token,
            req_pool_indices,
            lens,
            self.kv_indptr,
            begins,
            kv_indices,
            self.req_to_token.stride(0),
        )
        self.get_num_kv_splits(num_kv_splits, lens)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to own and shared parts if the step has a plan; otherwise the engine's."""
        launch = self._launch
        if launch is None or is_windowed(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty((len(query), layer.tp_q_head_num, layer.v_head_dim))
        self._attend(launch, query, pool, layer, sinks, out)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    @torch.compiler.disable
    def _attend(
        self, launch: Launch, query: torch.Tensor, pool: Any, layer: Any, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        scaled = layer.k_scale is not None and layer.v_scale is not None
        scale = layer.scaling * (layer.k_scale_float if scaled else 1.0)
        logit_cap = logit_capping_mod(layer.logit_capping_method, layer.logit_cap)
        metadata = self.forward_metadata
        triton_kernels.attend_to_pieces(
            query,
            keys,
            values,
            self.req_to_token,
            self._array,
            launch.items,
            launch.parts,
            launch.weights,
            scale,
            logit_cap,
            self._tiling.block_rows,
            self._tiling.block_tokens,
        )
        # The engine's choice between the two forms of its first kernel.
        alone = layer.tp_q_head_num == values.shape[1]
        attend = engine_kernels._decode_att_m_fwd if alone else engine_kernels._decode_grouped_att_m_fwd
        attend(
            query,
            keys,
            values,
            metadata.attn_logits,
            metadata.attn_lse,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.num_kv_splits,
            self.max_kv_splits,
            scale,
            logit_cap,
        )
        triton_kernels.merge(
            metadata.attn_logits,
            metadata.attn_lse,
            metadata.kv_indptr,
            metadata.num_kv_splits,
            engine_kernels._MIN_BLOCK_KV,
            self._array,
            self._capacity,
            launch.parts,
            launch.weights,
            sinks,
            layer.v_scale_float if scaled else 1.0,
            out,
        )
