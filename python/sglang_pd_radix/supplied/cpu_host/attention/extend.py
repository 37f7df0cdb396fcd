"""Attention of new tokens to themselves and to what came before them, request by request.

For prompts of which most is cached: the engine's torch backend attends to them as if all of their tokens were new, and
throws away what it finds for the old ones. And for layers with a sliding window, where a token attends to itself
and to the ``window`` tokens before it: the engine's attends to all tokens, and to those of the full pool where such
layers have one of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

#: Queries that are masked at once; with a window, each such block reads its own keys.
BLOCK = 512


def extend_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_of: Any,
    start: int,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of one request's tokens from position ``start`` on.

    q: (tokens, heads, size). keys, values: the layer's pool, (slots, KV heads, size). slots_of: gives the slots of the
    positions from a to b. window: None for all that came before. Returns (tokens, heads, size of a value).
    """
    if window is None:
        # Gathered once for all blocks, which read it from its start.
        slots = slots_of(0, start + len(q))
        keys, values = keys[slots].to(q.dtype), values[slots].to(q.dtype)
        if start <= len(q) and keys.shape[-1] == values.shape[-1]:
            # With masks a score costs up to 1.6 times what it does in torch's causal form. That has no rows to begin
            # at, but where no more than half is cached it is the faster one.
            whole = torch.cat([q.new_zeros(start, *q.shape[1:]), q]) if start else q
            return attend(whole, keys, values, scaling, causal=True)[start:]
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    for a in range(0, len(q), BLOCK):
        b = min(a + BLOCK, len(q))
        first = 0 if window is None else max(0, start + a - window)
        of = slice(0, start + b) if window is None else slots_of(first, start + b)
        at, to = torch.arange(start + a, start + b).unsqueeze(1), torch.arange(first, start + b)
        seen = to <= at if window is None else (to <= at) & (to >= at - window)
        out[a:b] = attend(q[a:b], keys[of].to(q.dtype), values[of].to(q.dtype), scaling, seen)
    return out


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    seen: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of ``q``, (queries, heads, size), to ``keys`` and ``values``, (tokens, KV heads, size); as ``q``.

    seen: what each query attends to, bool, (queries, tokens); None: to all, or with ``causal`` to those up to its own.
    """
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
    gqa = q.shape[1] != keys.shape[1]
    found = scaled_dot_product_attention(query, key, value, seen, is_causal=causal, scale=scaling, enable_gqa=gqa)
    return found[0].transpose(0, 1)


def forward(q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> torch.Tensor:
    """What an attention backend's ``forward_extend`` and ``forward_decode`` do, for a causal layer."""
    pool, table = batch.token_to_kv_pool, batch.req_to_token_pool.req_to_token
    if save_kv_cache:
        pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
    # A pool of their own has other slots; the engine keeps a table from those of the full pool.
    own_pool = window is not None and getattr(pool, "layers_mapping", None)
    mapping = pool.full_to_swa_index_mapping if own_pool else None
    rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    starts = [n - 1 for n in lens] if batch.forward_mode.is_decode() else batch.extend_prefix_lens.tolist()
    q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    # A batch that was filled up to another's size has more tokens than its requests.
    out, at = q.new_zeros(len(q), layer.tp_q_head_num, layer.v_head_dim), 0
    for row, start, end in zip(rows, starts, lens, strict=True):

        def slots_of(a: int, b: int, row: int = row) -> torch.Tensor:
            slots = table[row, a:b].long()
            return slots if mapping is None else mapping[slots].long()

        to = at + end - start
        out[at:to] = extend_attention(q[at:to], keys, values, slots_of, start, window, layer.scaling)
        at = to
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
