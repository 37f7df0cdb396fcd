"""Linear attention (gated delta networks, GDN, and Kimi's, KDA) in torch.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024): a head keeps a matrix S of V x K numbers, and a token with the
query q, key k, value v, decay g <= 0 (its logarithm) and strength beta changes and reads it by

    S = exp(g) S;  S = S + beta (v - S k) k^T;  o = S q

Queries and keys are scaled to length 1, queries by K^-1/2 besides. In KDA (Kimi team, "Kimi Linear", 2025) g has K
numbers, one for each column of S. A request's state is one slot of the engine's pool:
S of each head, float32 (heads, V, K), and the last inputs of the convolution before it (channels, width - 1).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import kernels

if TYPE_CHECKING:
    import torch

#: Tokens that `gated_delta_rule` takes at once, and between two of the states that it returns; the engine's FLA kernels
#: have the same, and its scheduler counts on it where it keeps states for a prefix cache (`extra_buffer`).
CHUNK = 64


def gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and strength, float32 (1, tokens, heads), of tokens with the inputs ``a`` and ``b``, (tokens, heads)."""
    from torch.nn.functional import softplus

    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def kda_gating(g: torch.Tensor, A: torch.Tensor, head_k_dim: int, g_bias: torch.Tensor, **_: Any) -> torch.Tensor:
    """Decay, float32 (.., heads, K), of tokens with the inputs ``g``, (.., heads x K)."""
    from torch.nn.functional import softplus

    g = g.float() + g_bias.float()
    return -A.float().exp().view(-1, 1) * softplus(g.view(*g.shape[:-1], -1, head_k_dim))


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(tokens, heads, size) as float32 (heads, tokens, size); each query and key head serves several value heads."""
    each = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(each, 1).transpose(0, 1) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k)))
    return q, k, v.float().transpose(0, 1)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Extend sequences. q, k, v: (1, tokens, heads, size), one sequence after the other; beta: (1, tokens, heads).

    g: like beta, or for KDA (1, tokens, heads, K). initial_state: (sequences, heads, V, K). cu_seqlens: where each
    begins, and the end. Returns the outputs, like ``v``; the states at the ends; and those at the beginning of each
    chunk of each sequence, (1, chunks, heads, V, K).
    """
    import torch

    out, ends, begins = torch.empty_like(v), [], []
    decay = g if g.dim() == 4 else g.unsqueeze(3)
    bounds = cu_seqlens.tolist()
    for state, start, end in zip(initial_state.float(), bounds, bounds[1:], strict=False):
        for at in range(start, end, CHUNK):
            part = slice(at, min(at + CHUNK, end))
            begins.append(state)
            query, key, value = _heads_first(q[0, part], k[0, part], v[0, part])
            read, state = _chunk(query, key, value, decay[0, part].transpose(0, 1), beta[0, part].t(), state)
            out[0, part] = read.transpose(0, 1).to(out.dtype)
        ends.append(state)
    return out, torch.stack(ends), torch.stack(begins).unsqueeze(0)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of one sequence, in the closed form of the paper's section 3.3; heads first. Returns out and state."""
    import torch

    decay = g.float().cumsum(1)
    system = (beta.unsqueeze(2) * _pairs(k, k, decay)).tril(-1)
    # What each token would read of the state before the chunk, and what it writes: of both the changes that earlier
    # tokens of the chunk make are taken away.
    known = (k * decay.exp()) @ state.transpose(1, 2)
    wanted = beta.unsqueeze(2) * (v - known)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return read_chunk(q, k, written, decay, state)


def _pairs(q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The products of queries with what is left of the keys of tokens before them and their own, (heads, q, k)."""
    import torch

    # What is above the diagonal is never used and must not overflow.
    seen = torch.ones(q.shape[1], q.shape[1]).tril().unsqueeze(2)
    left = ((decay.unsqueeze(2) - decay.unsqueeze(1)) * seen).exp() * seen
    if left.shape[3] == 1:
        return (q @ k.transpose(1, 2)) * left[..., 0]
    return (q.unsqueeze(2) * k.unsqueeze(1) * left).sum(3)


def read_chunk(
    q: torch.Tensor, k: torch.Tensor, written: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the queries of a chunk read, and the state behind it, where token i adds ``written[i] k[i]^T``; heads first.

    decay: its logarithm, summed up to each token, (heads, tokens, 1 or K).
    """
    out = (q * decay.exp()) @ state.transpose(1, 2) + _pairs(q, k, decay) @ written
    left = (decay[:, -1:] - decay).exp()
    return out, decay[:, -1:].exp() * state + written.transpose(1, 2) @ (k * left)


def gated_delta_step(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """As many tokens of each of several requests. q, k, v: (1, tokens, heads, size); a, b: (tokens, heads).

    For KDA, a: (tokens, heads x K) and b: (1, tokens, heads).

    The tokens are one request after the other, and each token of a request follows the one before it: a draft is a
    chain. initial_state_source: the pool's states, (slots, heads, V, K), of which those at ``initial_state_indices``
    are advanced, unless ``disable_state_update``. intermediate_states_buffer: (rows, tokens of a request, heads, V, K),
    takes in its rows ``intermediate_state_indices`` the state after each token. Returns the outputs, like ``v``.
    """
    import torch

    _chains_only(retrieve_parent_token)
    slots = initial_state_indices.long()
    requests = len(cu_seqlens) - 1
    g, beta = (
        (kda_gating(a, A_log, k.shape[3], dt_bias), b.float().sigmoid()) if is_kda else gating(A_log, a, b, dt_bias)
    )
    g, beta = (x.reshape(requests, -1, v.shape[2], size) for x, size in ((g, k.shape[3] if is_kda else 1), (beta, 1)))
    # Several tokens of each request, whose heads do not mix, have the shape of several tokens of one.
    query, key, value = (x.transpose(0, 1).unflatten(0, (requests, -1)) for x in _heads_first(q[0], k[0], v[0]))
    state = initial_state_source[slots].float()
    rows = None if intermediate_state_indices is None else intermediate_state_indices[:requests].long()
    read = []
    for token in range(q.shape[1] // requests):
        state = state * g[:, token].exp().unsqueeze(2)
        change = beta[:, token] * (value[:, token] - torch.einsum("rhvk,rhk->rhv", state, key[:, token]))
        state = state + change.unsqueeze(3) * key[:, token].unsqueeze(2)
        read.append(torch.einsum("rhvk,rhk->rhv", state, query[:, token]))
        if intermediate_states_buffer is not None:
            intermediate_states_buffer[rows, token] = state.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        initial_state_source[slots] = state.to(initial_state_source.dtype)
    return torch.stack(read, 1).view(v.shape).to(v.dtype)


def kda_rule(*, initial_state: torch.Tensor, initial_state_indices: torch.Tensor, **sequences: Any) -> torch.Tensor:
    """`gated_delta_rule` on states of the pool, (slots, heads, V, K), which it advances. Returns the outputs."""
    slots = initial_state_indices.long()
    out, ends, _ = gated_delta_rule(initial_state=initial_state[slots], **sequences)
    initial_state[slots] = ends.to(initial_state.dtype)
    return out


def _chains_only(table: torch.Tensor | None) -> None:
    if table is not None:
        raise NotImplementedError("On a CPU host drafts are chains: give --speculative-eagle-topk 1.")


def _activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    from torch.nn.functional import silu

    return silu(x) if activation in ("silu", "swish") else x


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The convolution over sequences. x: (channels, tokens), one sequence after the other; weight: (channels, width).

    conv_states: (slots, channels, width - 1), the inputs before a sequence, where ``has_initial_state``; zeros, where
    not. Those of the sequences are replaced by their last inputs. Returns (channels, tokens).
    """
    import torch
    from torch.nn.functional import conv1d

    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    kernel = weight.unsqueeze(1)
    for i, slot in enumerate(cache_indices.tolist()):
        start, end = bounds[i], bounds[i + 1]
        before = conv_states[slot].to(x.dtype)
        joined = torch.cat((before if has_initial_state[i] else torch.zeros_like(before), x[:, start:end]), 1)
        out[:, start:end] = _activate(conv1d(joined, kernel, bias, groups=len(kernel)), activation)
        conv_states[slot] = joined[:, joined.shape[1] - before.shape[1] :].to(conv_states.dtype)
    return out


def causal_conv_step(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The same for one token of each of several requests, or some. x: (requests, channels) or (.., channels, tokens).

    intermediate_conv_window: (rows, tokens, channels, width - 1), takes in its rows ``intermediate_state_indices`` the
    last inputs after each token.
    """
    import torch

    _chains_only(retrieve_next_token)
    slots = conv_state_indices.long()
    width = weight.shape[1]
    joined = torch.cat((conv_states[slots].to(x.dtype), x.view(*x.shape[:2], -1)), 2)
    conv_states[slots] = joined[:, :, joined.shape[2] - width + 1 :].to(conv_states.dtype)
    # (requests, channels, tokens, width)
    inputs = joined.unfold(2, width, 1)
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        rows = intermediate_state_indices.long()
        intermediate_conv_window[rows] = inputs[..., 1:].transpose(1, 2).to(intermediate_conv_window.dtype)
    out = (inputs * weight[:, None]).sum(3)
    out = _activate(out if bias is None else out + bias[:, None], activation)
    # The engine goes on with a view that only the layout of ``x`` allows.
    return torch.empty_like(x).copy_(out.view(x.shape))


def take_verified(states: torch.Tensor, intermediate: torch.Tensor, slots: torch.Tensor, steps: torch.Tensor) -> None:
    """``fused_mamba_state_scatter_with_mask``: each request's state becomes the one after its last accepted token.

    states: (layers, slots, ..). intermediate: (layers, requests, tokens, ..). steps: of each request, the token's
    place in its draft; below 0, the state stays.
    """
    taken = (steps >= 0).nonzero()[:, 0]
    states[:, slots[taken].long()] = intermediate[:, taken, steps[taken].long()]


def keep_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
) -> None:
    """Copy the states of the requests that the mask names to the slots that are kept for the prefix cache."""
    mask = mamba_track_mask[:batch_size]
    sources, targets = cache_indices[:batch_size][mask].long(), mamba_track_indices[:batch_size][mask].long()
    for states in (conv_states, ssm_states):
        states[targets] = states[sources]


def _patch_kernels(module: Any) -> None:
    import torch

    if not isinstance(module, kernels.KernelPlaceholder):
        return
    # What the engine calls on a CPU, by the names of the CPU build of sgl_kernel.
    supplied = {
        "causal_conv1d_fn_cpu": causal_conv,
        "causal_conv1d_update_cpu": causal_conv_step,
        "chunk_gated_delta_rule_cpu": gated_delta_rule,
    }
    vars(module).update(supplied)
    ops = torch.ops.sgl_kernel
    ops.fused_gdn_gating_cpu, ops.fused_sigmoid_gating_delta_rule_update_cpu = gating, gated_delta_step


def _patch_kda(module: Any) -> None:
    # Each of the three modules has one or two of these names.
    supplied = {
        "causal_conv1d_fn": causal_conv,
        "chunk_kda": kda_rule,
        "fused_kda_gate": kda_gating,
        "fused_sigmoid_gating_delta_rule_update": gated_delta_step,
    }
    vars(module).update(supplied)


def _patch_kimi(module: Any) -> None:
    import wrapt

    _patch_kda(module)

    @wrapt.patch_function_wrapper(module, "KimiLinearModel.__init__")
    def init(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The other models make a stream only on CUDA.
        cuda = module.torch.cuda
        stream, cuda.Stream = cuda.Stream, lambda: None
        try:
            wrapped(*args, **kwargs)
        finally:
            cuda.Stream = stream


def _patch_backend(module: Any) -> None:
    # Both are left out on a CPU, where the engine keeps no states of prefixes (`extra_buffer`).
    module.FLA_CHUNK_SIZE = CHUNK
    module.track_mamba_states_if_needed = keep_states
    module.fused_mamba_state_scatter_with_mask = take_verified


def _patch_pool(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "MambaPool.__init__")
    def init(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The engine has the states after each token of a draft on CUDA, wherever the pool is.
        tokens = kwargs.pop("speculative_num_draft_tokens", None)
        wrapped(*args, **kwargs)
        if tokens is None:
            return
        kept, requests = instance.mamba_cache, kwargs["spec_state_size"] + 1
        ssm, *windows = (
            states.new_zeros(len(states), requests, tokens, *states.shape[2:]) for states in (kept.temporal, *kept.conv)
        )
        instance.mamba_cache = instance.SpeculativeState(
            conv=kept.conv, temporal=kept.temporal, intermediate_ssm=ssm, intermediate_conv_window=windows
        )


def _patch_norm(module: Any) -> None:
    def forward(self: Any, x: torch.Tensor, g: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from torch.nn.functional import rms_norm, sigmoid

        gate = g.float()
        gate = sigmoid(gate) if self.activation == "sigmoid" else _activate(gate, "silu")
        return (rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps) * gate).to(x.dtype)

    module.FusedRMSNormGated.forward = forward


def _patch_norm_apart(module: Any) -> None:
    def forward(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if self.activation not in ("swish", "silu"):
            raise NotImplementedError(f"On a CPU host this norm has no gate by {self.activation}.")
        # The engine's own reference for its kernel.
        options = {"eps": self.eps, "group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return module.rms_norm_ref(x, self.weight, self.bias, z, **options)

    module.RMSNorm.forward = forward


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_cpu_backends")
    def exact(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu" and instance.dtype in ("float32", "float"):
            # Else the inputs of convolutions are kept in bfloat16, and answers depend on where chunks end.
            os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        wrapped()

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_mamba_radix_cache")
    def handle(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # It asks for CUDA where states of prefixes are kept (`extra_buffer`), for the sake of the kernels above.
        asked, module.is_cuda = module.is_cuda, lambda: True
        try:
            wrapped(*args, **kwargs)
        finally:
            module.is_cuda = asked


HOOKS: dict[str, Callable[[Any], None]] = {
    "sgl_kernel.mamba": _patch_kernels,
    "sglang.srt.layers.attention.fla.fused_norm_gate": _patch_norm,
    "sglang.srt.layers.attention.fla.layernorm_gated": _patch_norm_apart,
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": _patch_backend,
    "sglang.srt.layers.attention.linear.kda_backend": _patch_kda,
    "sglang.srt.layers.attention.linear.kernels.kda_triton": _patch_kda,
    "sglang.srt.mem_cache.memory_pool": _patch_pool,
    "sglang.srt.models.kimi_linear": _patch_kimi,
    "sglang.srt.server_args": _patch_server_args,
}
