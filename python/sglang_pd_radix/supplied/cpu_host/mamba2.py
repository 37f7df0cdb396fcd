"""Mamba2 layers in torch.

Dao, Gu, "Transformers are SSMs" (2024): a head keeps a matrix S of P x N numbers, and a token with the input x (P), the
step dt > 0, and B and C (N), which several heads share, changes and reads it by

    S = exp(dt A) S + dt x B^T;  y = S C + D x

with A < 0 and D of the head. A request's state is one slot of the engine's pool: S of each head, float32 (heads, P, N),
and the last inputs of the convolution before it (channels, width - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .linear_attention import CHUNK, causal_conv, causal_conv_step, read_chunk

if TYPE_CHECKING:
    import torch


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """``mamba_chunk_scan_combined``: extend sequences, one after the other.

    x, out: (1, tokens, heads, P). dt: (1, tokens, heads), before bias and softplus. A, D, dt_bias: (heads,). B, C:
    (1, tokens, groups, N). initial_states: (sequences, heads, P, N), zeros if None. cu_seqlens: where each begins, and
    the end. Writes ``out`` and returns the states at the ends.
    """
    import torch
    from torch.nn.functional import softplus

    heads = x.shape[2]
    step = softplus(dt[0].float() + dt_bias.float()).t()
    value = x[0].float().transpose(0, 1)
    read, write = (t[0].float().repeat_interleave(heads // t.shape[2], 1).transpose(0, 1) for t in (C, B))
    decay, written = step.unsqueeze(2) * A.float()[:, None, None], step.unsqueeze(2) * value
    bounds, ends = cu_seqlens.tolist(), []
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = x.new_zeros(heads, x.shape[3], B.shape[3], dtype=torch.float32)
        state = state if initial_states is None else initial_states[i].float()
        for at in range(start, end, CHUNK):
            part = slice(at, min(at + CHUNK, end))
            y, state = read_chunk(read[:, part], write[:, part], written[:, part], decay[:, part].cumsum(1), state)
            out[0, part] = (y + D.float()[:, None, None] * value[:, part]).transpose(0, 1).to(out.dtype)
        ends.append(state)
    return torch.stack(ends)


def scan_step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    disable_state_update: bool = False,
    **_: Any,
) -> None:
    """``selective_state_update``: one token of each of several requests.

    state: the pool's, (slots, heads, P, N), of which those at ``state_batch_indices`` are advanced. x, dt, out:
    (requests, heads, P). A: (heads, P, N). B, C: (requests, groups, N). D, dt_bias: (heads, P). Writes ``out``.
    """
    from torch.nn.functional import softplus

    if disable_state_update:
        raise NotImplementedError("On a CPU host Mamba2 layers verify no drafts: leave out --speculative-algorithm.")
    slots, heads = state_batch_indices.long(), x.shape[1]
    read, write = (t.float().repeat_interleave(heads // t.shape[1], 1).unsqueeze(2) for t in (C, B))
    step = softplus(dt.float() + dt_bias.float()).unsqueeze(3)
    now = state[slots].float() * (step * A.float()).exp() + step * x.float().unsqueeze(3) * write
    state[slots] = now.to(state.dtype)
    out.copy_((now * read).sum(3) + D.float() * x.float())


def _patch_layer(module: Any) -> None:
    module.causal_conv1d_fn = module.causal_conv1d_fn_triton = causal_conv
    module.causal_conv1d_update = module.causal_conv1d_update_triton = causal_conv_step
    module.mamba_chunk_scan_combined, module.selective_state_update = scan, scan_step


HOOKS: dict[str, Callable[[Any], None]] = {"sglang.srt.layers.attention.mamba.mamba": _patch_layer}
