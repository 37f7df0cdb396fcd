"""Attention of layers with a sliding window: a token attends to itself and to the ``window`` tokens before it.

The engine's torch backend attends to all tokens, and to those of the full pool where such layers have one of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

#: Queries that are taken at once; each such block reads its own window of keys.
BLOCK = 512


def window_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_of: Any,
    start: int,
    window: int,
    scaling: float,
) -> torch.Tensor:
    """Attention of one request's tokens from position ``start`` on.

    q: (tokens, heads, size). keys, values: the layer's pool, (slots, KV heads, size). slots_of: gives the slots of the
    positions from a to b. Returns (tokens, heads, size of a value).
    """
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    for a in range(0, len(q), BLOCK):
        b = min(a + BLOCK, len(q))
        first = max(0, start + a - window)
        slots = slots_of(first, start + b)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], keys[slots], values[slots]))
        at = torch.arange(start + a, start + b).unsqueeze(1)
        of = torch.arange(first, start + b)
        seen = (of <= at) & (of >= at - window)
        found = scaled_dot_product_attention(
            query, key.to(q.dtype), value.to(q.dtype), seen, scale=scaling, enable_gqa=q.shape[1] != keys.shape[1]
        )
        out[a:b] = found[0].transpose(0, 1)
    return out


def forward(q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> torch.Tensor:
    """What an attention backend's ``forward_extend`` and ``forward_decode`` do, for a layer with a window."""
    pool, table = batch.token_to_kv_pool, batch.req_to_token_pool.req_to_token
    if save_kv_cache:
        pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    # A pool of their own has other slots; the engine keeps a table from those of the full pool.
    mapping = pool.full_to_swa_index_mapping if getattr(pool, "layers_mapping", None) else None
    rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    starts = [n - 1 for n in lens] if batch.forward_mode.is_decode() else batch.extend_prefix_lens.tolist()
    q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    parts, at = [], 0
    for row, start, end in zip(rows, starts, lens, strict=True):

        def slots_of(a: int, b: int, row: int = row) -> torch.Tensor:
            slots = table[row, a:b].long()
            return slots if mapping is None else mapping[slots].long()

        some = q[at : at + end - start]
        window = layer.sliding_window_size
        parts.append(window_attention(some, keys, values, slots_of, start, window, layer.scaling))
        at += end - start
    return torch.cat(parts).reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
