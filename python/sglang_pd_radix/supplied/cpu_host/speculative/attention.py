"""The ``triton`` backend's attention: new tokens with cached ones, and drafts."""

from __future__ import annotations

from typing import Any

import torch

from ..attention.extend import attend

# Query rows that are masked at a time: a prompt's mask as a whole would be as large as its scores.
ROWS = 512


def _plain(**options: Any) -> None:
    """Raise NotImplementedError for what these forms leave out; each value is the kernel's default, or an error."""
    for name, (value, default) in options.items():
        if value != default:
            raise NotImplementedError(f"Attention with {name} {value} has no torch form for the triton backend.")


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: torch.Tensor | None = None,
    window_kv_offsets: torch.Tensor | None = None,
    xai_temperature_len: int = -1,
) -> None:
    """``extend_attention_fwd``: each new token attends to all cached ones and, masked, to the new ones.

    custom_mask: of each request ``new * (cached + new)`` flags from ``mask_indptr`` on, by rows; of these only the
    last ``new`` columns count. It takes the place of the causal mask.
    """
    _plain(
        logit_cap=(logit_cap, 0.0),
        sinks=(sinks, None),
        xai_temperature_len=(xai_temperature_len, -1),
        sliding_window_size=(sliding_window_size, -1),
        skip_prefix_custom_mask=(skip_prefix_custom_mask, True),
        kv_scale=((k_scale, v_scale), (1.0, 1.0)),
    )
    scale = sm_scale or q.shape[-1] ** -0.5
    starts, cached = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(starts) - 1):
        begin, end = starts[i], starts[i + 1]
        slots = kv_indices[cached[i] : cached[i + 1]]
        new, prefix = end - begin, len(slots)
        keys, values = torch.cat((k_buffer[slots], k[begin:end])), torch.cat((v_buffer[slots], v[begin:end]))
        for first in range(0, new, ROWS):
            rows = slice(first, min(first + ROWS, new))
            mask = torch.ones((rows.stop - first, prefix + new), dtype=torch.bool)
            if custom_mask is not None and mask_indptr is not None:
                at = int(mask_indptr[i])
                whole = custom_mask[at : at + new * (prefix + new)].view(new, prefix + new)
                mask[:, prefix:] = whole[rows, prefix:]
            elif is_causal:
                mask[:, prefix:] = torch.arange(new) <= torch.arange(first, rows.stop)[:, None]
            out[begin:end][rows] = attend(q[begin:end][rows], keys, values, scale, mask)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    xai_temperature_len: int = -1,
) -> None:
    """``decode_attention_fwd``: one token of each request attends to all of ``kv_indices``."""
    _plain(
        logit_cap=(logit_cap, 0.0),
        sinks=(sinks, None),
        xai_temperature_len=(xai_temperature_len, -1),
        kv_scale=((k_scale, v_scale), (1.0, 1.0)),
    )
    starts = kv_indptr.tolist()
    for i in range(len(q)):
        slots = kv_indices[starts[i] : starts[i + 1]]
        out[i : i + 1] = attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], sm_scale)
