"""The attention backend ``torch_batched``: the decode attention of a batch in a few calls, shared KV read once; and of
prompts what is new."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import get_attention_tp_size
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pd_radix.supplied.shared_prefix.levels import Costs, LayerShape, Level, choose_levels
from sglang_pd_radix.supplied.shared_prefix.prefixes import RunningPrefixes
from sglang_pd_radix.supplied.shared_prefix.written_rows import WrittenRows

from . import extend, shares_prefixes
from .kernel import Plan, Workspace, decode_attention
from .plan import Layout

#: On one thread, where a byte is gathered and then read again, by least squares over its times
#: (``docs/decisions/shared-prefixes-on-cpu-hosts.md``); two threads change all of it alike.
COSTS = Costs(byte=0.16, product=0.034, score=2.4, piece=20_000, query=30)

#: Steps whose requests have prefixes of their own lengths.
HAS_PREFIXES = (ForwardMode.EXTEND, ForwardMode.MIXED)


class TorchBatchedAttnBackend(TorchNativeAttnBackend):
    """Decode steps of plain layers as planned, what is new of prompts, and windows; else the engine's loop."""

    # Whether what several requests of a step share is read once.
    shares_prefixes = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._plan: Plan | None = None
        pool = model_runner.token_to_kv_pool
        self._takes_pool = _takes(pool, model_runner.dtype)
        if not self._takes_pool:
            return
        self._layout: Layout | None = None
        self._workspace = Workspace()
        keys, values = pool.get_key_buffer(pool.start_layer), pool.get_value_buffer(pool.start_layer)
        # The pool is read by pages where it can be; a page of 1 always can.
        self._page_size = pool.page_size if keys.shape[0] % pool.page_size == 0 else 1
        kv_heads, dim = keys.shape[1:]
        latent = keys.data_ptr() == values.data_ptr()
        self._shape = LayerShape(
            heads=model_runner.model_config.num_attention_heads // get_attention_tp_size(),
            kv_heads=kv_heads,
            dims=2 * dim,
            kv_bytes=(1 if latent else 2) * kv_heads * dim * keys.element_size(),
        )
        self._prefixes = RunningPrefixes(self._page_size) if shares_prefixes() else None
        self.shares_prefixes = self._prefixes is not None
        self._written = WrittenRows(model_runner.req_to_token_pool)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the plan of a decode step, which all its layers share."""
        if self._takes_pool:
            decodes = forward_batch.forward_mode.is_decode() and forward_batch.spec_info is None
            self._plan = self._next_plan(forward_batch) if decodes else None

    def _next_plan(self, forward_batch: Any) -> Plan:
        table = forward_batch.req_to_token_pool.req_to_token.numpy()
        # Without what the engine fills a batch up with, to the size of another DP rank's.
        count = getattr(forward_batch, "_original_batch_size", forward_batch.batch_size)
        rows = forward_batch.req_pool_indices.numpy()[:count]
        lens = forward_batch.seq_lens.numpy()[:count]
        layout = self._layout
        same = layout is not None and np.array_equal(rows, layout.rows) and self._written.rows.isdisjoint(rows.tolist())
        if layout is None or not same or not layout.advance(lens):
            levels = self._levels(table, rows, lens)
            layout = self._layout = Layout(
                table, rows.copy(), lens.copy(), levels, self._page_size, self._shape.kv_bytes
            )
        return layout.plan()

    def _levels(self, table: np.ndarray, rows: np.ndarray, lens: np.ndarray) -> list[Level]:
        """What to read together, when the tree of running prefixes has followed the batch."""
        if self._prefixes is None:
            self._written.rows.clear()
            return []
        now = dict(zip(rows.tolist(), lens.tolist(), strict=True))
        if len(now) < len(rows):  # the engine's dummy batches are of one row
            return []
        before = self._prefixes.rows()
        for row in (before - now.keys()) | (before & self._written.rows):
            self._prefixes.remove(row)
        for row, length in now.items():
            if row not in self._prefixes:
                self._prefixes.add(row, table[row, :length])
        self._written.rows.clear()
        return choose_levels(self._prefixes, self._shape, COSTS)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """As the engine, but for windows, which it leaves out, and for what is cached, which it computes again."""
        cached = forward_batch.forward_mode in HAS_PREFIXES and bool(forward_batch.extend_prefix_lens.any())
        if _has_window(layer) or (cached and _is_plain(layer)):
            return extend.forward(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """As planned, or as the engine does what the plan is not for."""
        if _has_window(layer):
            return extend.forward(q, k, v, layer, forward_batch, save_kv_cache)
        if self._plan is None or not _is_plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        planned = len(self._plan.inverse)
        out = decode_attention(
            queries[:planned],
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._plan,
            self._page_size,
            layer.scaling,
            self._workspace,
        )
        if planned < len(queries):
            out = torch.cat([out, out.new_zeros(len(queries) - planned, *out.shape[1:])])
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _takes(pool: Any, dtype: torch.dtype) -> bool:
    """Whether a pool has keys and values of one size, or one vector for both, in the type that is computed in."""
    if type(pool) is MHATokenToKVPool:
        return pool.head_dim == pool.v_head_dim and pool.store_dtype == dtype
    return type(pool) is MLATokenToKVPool and pool.store_dtype == dtype


def _has_window(layer: Any) -> bool:
    """Whether a layer's attention is to its sliding window and no different in any other way."""
    plain = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention and layer.logit_cap == 0
    return plain and layer.sliding_window_size > -1


def _is_plain(layer: Any) -> bool:
    """Whether a layer is causal attention to all that came before, and no more."""
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.logit_cap == 0
        and layer.sliding_window_size == -1
        and layer.xai_temperature_len == -1
    )
