"""Decode attention to shared pieces of KV, and the merge with each request's own part.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_plan import HEADER, ITEM

#: Products with float32 accuracy; NVIDIA's units have TF32 only, so three products there.
FLOAT32_PRODUCTS = "ieee" if torch.version.hip else "tf32x3"

_HEADER = tl.constexpr(HEADER)
_ITEM = tl.constexpr(ITEM)


@triton.jit
def _attend_to_pieces(
    query,  # [requests, heads, KEY_DIM]
    keys,  # [slots, KV heads, KEY_DIM]
    values,  # [slots, KV heads, VALUE_DIM]
    table,  # req_to_token
    plan,
    parts,  # [partial results, HEADS, VALUE_DIM], float32
    weights,  # [partial results, HEADS], float32: log-sum-exp
    scale,
    stride_request,
    stride_head,
    stride_key_slot,
    stride_key_head,
    stride_value_slot,
    stride_value_head,
    stride_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One item of the plan and one KV head: the queries of all its members are rows of one product."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    # A graph is captured with the maximum number of items.
    if item < tl.load(plan):
        entry = plan + tl.load(plan + 2) + item * _ITEM
        table_row = tl.load(entry).to(tl.int64)
        start = tl.load(entry + 1)
        end = tl.load(entry + 2)
        first = tl.load(entry + 3)
        block = tl.load(entry + 4)
        count = tl.load(entry + 5)

        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        used = row < count * GROUP
        part = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        request = tl.load(plan + tl.load(plan + 1) + part, mask=used, other=0).to(tl.int64)

        key_dim = tl.arange(0, BLOCK_KEY)
        value_dim = tl.arange(0, BLOCK_VALUE)
        in_key = key_dim < KEY_DIM
        in_value = value_dim < VALUE_DIM
        q = tl.load(
            query + request[:, None] * stride_request + head[:, None] * stride_head + key_dim[None, :],
            mask=used[:, None] & in_key[None, :],
            other=0.0,
        )

        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
        for begin in range(start, end, BLOCK_TOKENS):
            token = begin + tl.arange(0, BLOCK_TOKENS)
            inside = token < end
            slot = tl.load(table + table_row * stride_row + token, mask=inside, other=0).to(tl.int64)
            k = tl.load(
                keys + slot[None, :] * stride_key_slot + kv_head * stride_key_head + key_dim[:, None],
                mask=inside[None, :] & in_key[:, None],
                other=0.0,
            )
            score = tl.dot(q, k, input_precision=PRECISION) * scale
            if LOGIT_CAP > 0:
                score = LOGIT_CAP * (2 * tl.sigmoid(2 * score / LOGIT_CAP) - 1)
            score = tl.where(inside[None, :], score, float("-inf"))
            v = tl.load(
                values + slot[:, None] * stride_value_slot + kv_head * stride_value_head + value_dim[None, :],
                mask=inside[:, None] & in_value[None, :],
                other=0.0,
            )
            # Each block has a valid token, so the new maximum is finite.
            new_top = tl.maximum(top, tl.max(score, 1))
            fade = tl.exp(top - new_top)
            weight = tl.exp(score - new_top[:, None])
            total = total * fade + tl.sum(weight, 1)
            result = result * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
            top = new_top

        out = part.to(tl.int64) * HEADS + head
        tl.store(
            parts + out[:, None] * VALUE_DIM + value_dim[None, :],
            result / total[:, None],
            mask=used[:, None] & in_value[None, :],
        )
        tl.store(weights + out, top + tl.log(total), mask=used)


@triton.jit
def _merge(
    own,  # [requests, heads, splits, VALUE_DIM], float32
    own_weights,  # [requests, heads, splits], float32
    own_starts,  # kv_indptr of the own parts
    own_splits,  # [requests]
    plan,
    parts,
    weights,
    sinks,  # [heads], or None
    out,  # [requests, heads, VALUE_DIM]
    value_scale,
    capacity,
    stride_own_request,
    stride_own_head,
    stride_own_split,
    stride_weights_request,
    stride_weights_head,
    stride_weights_split,
    stride_out_request,
    stride_out_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One request and head: sum of exp(lse) * result over sum of exp(lse), with a running maximum."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_VALUE)
    inside = dim < VALUE_DIM

    top = -float("inf")
    total = 0.0
    result = tl.zeros([BLOCK_VALUE], tl.float32)

    # The engine's kernel gives a split a multiple of LEAST_SPLIT tokens and leaves the last ones empty.
    length = tl.load(own_starts + request + 1) - tl.load(own_starts + request)
    per_split = tl.cdiv(tl.cdiv(length, tl.load(own_splits + request)), LEAST_SPLIT) * LEAST_SPLIT
    for split in range(0, tl.cdiv(length, per_split)):
        lse = tl.load(
            own_weights + request * stride_weights_request + head * stride_weights_head + split * stride_weights_split
        )
        at = own + request * stride_own_request + head * stride_own_head + split * stride_own_split
        value = tl.load(at + dim, mask=inside, other=0.0)
        new_top = tl.maximum(top, lse)
        fade = tl.exp(top - new_top)
        weight = tl.exp(lse - new_top)
        total = total * fade + weight
        result = result * fade + weight * value
        top = new_top

    starts = plan + _HEADER + capacity
    sources = starts + capacity + 1
    for i in range(tl.load(starts + request), tl.load(starts + request + 1)):
        place = tl.load(sources + i).to(tl.int64) * HEADS + head
        lse = tl.load(weights + place)
        value = tl.load(parts + place * VALUE_DIM + dim, mask=inside, other=0.0)
        new_top = tl.maximum(top, lse)
        fade = tl.exp(top - new_top)
        weight = tl.exp(lse - new_top)
        total = total * fade + weight
        result = result * fade + weight * value
        top = new_top

    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    tl.store(
        out + request * stride_out_request + head * stride_out_head + dim, result / total * value_scale, mask=inside
    )


def attend_to_pieces(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    plan: torch.Tensor,
    items: int,
    parts: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    logit_cap: float,
    block_rows: int,
    block_tokens: int,
) -> None:
    """Compute ``parts`` and ``weights`` over the pieces of ``plan``, which has at most ``items`` items."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    _attend_to_pieces[(items, kv_heads)](
        query,
        keys,
        values,
        table,
        plan,
        parts,
        weights,
        scale,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        table.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        KEY_DIM=keys.shape[-1],
        VALUE_DIM=values.shape[-1],
        LOGIT_CAP=logit_cap,
        PRECISION=FLOAT32_PRODUCTS,
        BLOCK_ROWS=block_rows,
        BLOCK_TOKENS=block_tokens,
        BLOCK_KEY=triton.next_power_of_2(keys.shape[-1]),
        BLOCK_VALUE=triton.next_power_of_2(values.shape[-1]),
        num_warps=4,
        num_stages=2,
    )


def merge(
    own: torch.Tensor,
    own_weights: torch.Tensor,
    own_starts: torch.Tensor,
    own_splits: torch.Tensor,
    least_split: int,
    plan: torch.Tensor,
    capacity: int,
    parts: torch.Tensor,
    weights: torch.Tensor,
    sinks: torch.Tensor | None,
    value_scale: float,
    out: torch.Tensor,
) -> None:
    """Merge the engine's splits of each request's own part with its shared pieces into ``out``."""
    requests, heads, value_dim = out.shape
    _merge[(requests, heads)](
        own,
        own_weights,
        own_starts,
        own_splits,
        plan,
        parts,
        weights,
        sinks,
        out,
        value_scale,
        capacity,
        *own.stride()[:3],
        *own_weights.stride(),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        LEAST_SPLIT=least_split,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
