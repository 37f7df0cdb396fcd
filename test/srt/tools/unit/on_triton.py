"""Run by test_torch_forms.py with TRITON_INTERPRET=1: the engine's Triton kernels beside the torch forms.

Prints one JSON object: the greatest difference of each result.
"""

from __future__ import annotations

import contextlib
import inspect
import json

import torch
from sglang.srt.layers.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.layers.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update
from sglang.srt.layers.attention.hybrid_linear_attn_backend import track_mamba_state_if_needed_kernel
from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata
from sglang.srt.layers.attention.mamba.mamba_state_scatter_triton import _fused_mamba_state_scatter_with_mask_kernel
from sglang.srt.layers.attention.mamba.ops import mamba_ssm, ssd_combined
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

from sglang_pd_radix.supplied.cpu_host import linear_attention as here
from sglang_pd_radix.supplied.cpu_host import mamba2 as here_mamba2
from sglang_pd_radix.supplied.cpu_host.attention.extend import extend_attention

KEY_HEADS, VALUE_HEADS, K, V = 1, 2, 32, 16
CHANNELS = 12
torch.manual_seed(0)
torch.set_num_threads(1)
GATES = {"A_log": torch.randn(VALUE_HEADS) * 0.3, "dt_bias": torch.randn(VALUE_HEADS) - 2}
RULE = {"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0}
# States of linear attention and of the convolution, the weights of that, and whose states they are.
POOL, STATES, WEIGHT = torch.randn(6, VALUE_HEADS, V, K), torch.randn(5, CHANNELS, 3), torch.randn(CHANNELS, 4)
SLOTS = torch.tensor([2, 4, 0], dtype=torch.int32)


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    shapes = {"q": (KEY_HEADS, K), "k": (KEY_HEADS, K), "v": (VALUE_HEADS, V)}
    made = {name: torch.randn(1, tokens, *shape) for name, shape in shapes.items()}
    return made | {name: torch.randn(tokens, VALUE_HEADS) for name in ("a", "b")}


def apart(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    assert all(a.shape == b.shape for a, b in pairs)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


def gated_delta() -> dict[str, float]:
    found = {}
    # A decode step of three requests.
    slots, tokens = torch.tensor([4, 1, 2], dtype=torch.int32), inputs(3)
    args = {**GATES, **tokens, "cu_seqlens": torch.arange(4, dtype=torch.int32), "initial_state_indices": slots, **RULE}
    theirs, ours = POOL.clone(), POOL.clone()
    found["step"] = apart(
        (
            fused_sigmoid_gating_delta_rule_update(initial_state_source=theirs, **args),
            here.gated_delta_step(initial_state_source=ours, **args),
        ),
        (theirs, ours),
    )
    gate_args = (GATES["A_log"], tokens["a"], tokens["b"], GATES["dt_bias"])
    found["gating"] = apart(*zip(fused_gdn_gating(*gate_args), here.gating(*gate_args), strict=True))

    # Sequences of less than a chunk, of whole chunks and of more: token by token, as the decode kernel does it.
    ends = [0, 1, 65, 131]
    slots, tokens, ends_i32 = torch.arange(1, 4, dtype=torch.int32), inputs(ends[-1]), torch.tensor(ends).int()
    theirs = POOL.clone()
    args = {**GATES, **tokens, "cu_seqlens": ends_i32, "initial_state_indices": slots, **RULE}
    out = fused_sigmoid_gating_delta_rule_update(initial_state_source=theirs, **args)
    g, beta = here.gating(GATES["A_log"], tokens["a"], tokens["b"], GATES["dt_bias"])
    mine = here.gated_delta_rule(tokens["q"], tokens["k"], tokens["v"], g, beta, POOL[slots.long()], ends_i32)
    found["extend"] = apart((out, mine[0]), (theirs[slots.long()], mine[1]))

    # The state at the beginning of the last chunk is that after the chunks before it.
    args |= {name: tokens[name][:, 65:129] for name in ("q", "k", "v")} | {n: tokens[n][65:129] for n in ("a", "b")}
    args |= {"cu_seqlens": torch.tensor([0, 64]).int(), "initial_state_indices": slots[2:]}
    theirs = POOL.clone()
    fused_sigmoid_gating_delta_rule_update(initial_state_source=theirs, **args)
    assert len(mine[2][0]) == 4
    found["chunks"] = apart((theirs[slots[2]], mine[2][0, 3]))
    return found


def convolution() -> dict[str, float]:
    """With and without inputs before it."""
    found, starts = {}, torch.tensor([0, 1, 13, 21], dtype=torch.int32)
    x, theirs, ours = torch.randn(CHANNELS, 21), STATES.clone(), STATES.clone()
    more = {"has_initial_state": torch.tensor([True, False, True]), "cache_indices": SLOTS, "query_start_loc": starts}
    out = causal_conv1d_fn(
        x.clone(), WEIGHT, None, activation="silu", conv_states=theirs, seq_lens_cpu=[1, 12, 8], **more
    )
    found["conv"] = apart((out, here.causal_conv(x, WEIGHT, None, "silu", ours, **more)), (theirs, ours))
    x, theirs, ours = torch.randn(3, CHANNELS), STATES.clone(), STATES.clone()
    out = causal_conv1d_update(x.clone(), theirs, WEIGHT, None, "silu", conv_state_indices=SLOTS)
    found["conv step"] = apart((out, here.causal_conv_step(x, ours, WEIGHT, None, "silu", SLOTS)), (theirs, ours))
    return found


def verified() -> dict[str, float]:
    """Drafts of two requests that are verified: their states stay, and those after each token are kept apart."""
    found = {}
    count, rows = 4, torch.tensor([1, 0], dtype=torch.int32)
    tokens, drafts = inputs(2 * count), torch.arange(0, 3 * count, count, dtype=torch.int32)
    args = {**GATES, **tokens, "cu_seqlens": drafts, "initial_state_indices": SLOTS[:2], **RULE}
    args |= {"disable_state_update": True, "cache_steps": count, "intermediate_state_indices": rows}
    results = []
    for run in (fused_sigmoid_gating_delta_rule_update, here.gated_delta_step):
        ours, after = POOL.clone(), torch.zeros(3, count, *POOL.shape[1:])
        out = run(initial_state_source=ours, intermediate_states_buffer=after, **args)
        results.append((out, ours, after))
    assert torch.equal(results[1][1], POOL) and not results[1][2][2].any()
    found["verify"] = apart(*zip(*results, strict=True))
    x = torch.randn(2, count, CHANNELS).transpose(1, 2)
    more, results = {"conv_state_indices": SLOTS[:2], "intermediate_state_indices": rows}, []
    for run in (causal_conv1d_update, here.causal_conv_step):
        ours, after = STATES.clone(), torch.zeros(3, count, CHANNELS, 3)
        out = run(x, ours, WEIGHT, None, "silu", intermediate_conv_window=after, **more)
        assert out.stride() == x.stride()
        results.append((out, ours, after))
    found["conv verify"] = apart(*zip(*results, strict=True))
    theirs, after = torch.randn(2, 5, 7, 3), torch.randn(2, 3, count, 7, 3)
    ours, steps = theirs.clone(), torch.tensor([2, -1, 0], dtype=torch.int32)
    strides = *after.stride()[:3], *theirs.stride()[:2]
    sizes = after.shape[1], after.shape[2], theirs.shape[1]
    kernel = _fused_mamba_state_scatter_with_mask_kernel[(3, 2, 1)]
    kernel(after, theirs, SLOTS, steps, 3, 21, *strides, *sizes, BLOCK_SIZE=1024)
    here.take_verified(ours, after, SLOTS, steps)
    found["taken"] = apart((theirs, ours))
    return found


def kept() -> dict[str, float]:
    """States that are kept for a prefix cache."""
    found = {}
    args = (SLOTS, torch.tensor([True, False, True]), torch.tensor([1, 3, 3]))
    theirs, ours = (STATES.clone(), POOL[:5].clone()), (STATES.clone(), POOL[:5].clone())
    sizes = [len(t[0].flatten()) for t in theirs]
    track_mamba_state_if_needed_kernel[(3,)](*theirs, *args, *(t.stride(0) for t in theirs), *sizes, BLOCK_SIZE=1024)
    here.keep_states(*ours, *args, 3)
    found["kept"] = apart(*zip(theirs, ours, strict=True))
    return found


def norms() -> dict[str, float]:
    """They write to their input."""
    found = {}
    norm = fused_norm_gate.FusedRMSNormGated(V, eps=1e-6, activation="silu", dtype=torch.float32)
    norm.weight.data, x, gate = torch.randn(V), torch.randn(9, V), torch.randn(9, V)
    out = fused_norm_gate.rms_norm_gated(x.clone(), gate, norm.weight, None, "silu", eps=1e-6)
    found["norm"] = apart((out, norm(x, gate)))
    # Qwen3.5's; it counts the cores of a GPU to lay out its grid.
    layernorm_gated._get_sm_count = lambda device: 4
    assert layernorm_gated.RMSNorm.forward.__module__.startswith("sglang_pd_radix")
    norm = layernorm_gated.RMSNorm(V, eps=1e-6, norm_before_gate=True)
    norm.weight.data = torch.randn(V)
    out = layernorm_gated.layernorm_fn(x, norm.weight, None, z=gate, eps=1e-6, is_rms_norm=True)
    found["norm of Qwen3.5"] = apart((out, norm(x, gate)))
    return found


def window() -> dict[str, float]:
    """A sliding window that begins in a prefix and ends with each token; keys and values at mixed slots."""
    found = {}
    prefix, length, window, size = 21, 13, 5, 16
    slots, q, out = torch.randperm(64)[: prefix + length], torch.randn(length, 4, size), torch.empty(length, 4, size)
    keys, values, ends = torch.randn(64, 2, size), torch.randn(64, 2, size), torch.tensor([0, length]).int()
    new, scale = slots[prefix:], size**-0.5
    before = (torch.tensor([0, prefix]).int(), slots[:prefix], None, True, None, length, 1.0, 1.0, scale)
    kernel = inspect.unwrap(extend_attention_fwd)
    kernel(q, keys[new], values[new], out, keys, values, ends, *before, sliding_window_size=window)
    mine = extend_attention(q, keys, values, lambda a, b: slots[a:b], prefix, window, scale)
    found["window"] = apart((out, mine))
    return found


def kda() -> dict[str, float]:
    heads, size = 2, 16
    gates = {"A_log": torch.randn(1, 1, heads, 1) * 0.3, "dt_bias": torch.randn(heads * size) - 2}
    pool, slots = torch.randn(6, heads, size, size), torch.tensor([4, 1, 2], dtype=torch.int32)
    rule = {"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0, "is_kda": True}

    def inputs(tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        made = {name: torch.randn(1, tokens, heads, size) for name in "qkv"}
        return made, {"a": torch.randn(tokens, heads * size), "b": torch.randn(1, tokens, heads)}

    # A decode step of three requests; then sequences, token by token as the decode kernel does it.
    found, (tokens, inner) = {}, inputs(3)
    args = {**gates, **rule, "initial_state_indices": slots, "cu_seqlens": torch.arange(4, dtype=torch.int32)}
    theirs, ours = pool.clone(), pool.clone()
    out = fused_sigmoid_gating_delta_rule_update(**tokens, **inner, initial_state_source=theirs, **args)
    mine = here.gated_delta_step(**tokens, **inner, initial_state_source=ours, **args)
    found["KDA step"] = apart((out, mine), (theirs, ours))
    tokens, inner = inputs(131)
    args["cu_seqlens"], theirs, ours = torch.tensor([0, 1, 65, 131]).int(), pool.clone(), pool.clone()
    out = fused_sigmoid_gating_delta_rule_update(**tokens, **inner, initial_state_source=theirs, **args)
    g, beta = here.kda_gating(inner["a"], gates["A_log"], size, gates["dt_bias"]), inner["b"].sigmoid()
    pooled = {"initial_state": ours, "initial_state_indices": slots, "cu_seqlens": args["cu_seqlens"]}
    mine = here.kda_rule(**tokens, g=g.unsqueeze(0), beta=beta, **pooled)
    return found | {"KDA extend": apart((out, mine), (theirs, ours))}


def mamba2() -> dict[str, float]:
    # The engine's functions ask for a GPU by its number.
    torch.cuda.device = lambda number: contextlib.nullcontext()
    heads, size, groups, state, chunk = 4, 8, 2, 16, 32
    ends = torch.tensor([0, 1, 34, 104]).int()
    x, dt = 0.3 * torch.randn(1, 104, heads, size), torch.randn(1, 104, heads)
    shared = [0.3 * torch.randn(1, 104, groups, state) for _ in "BC"]
    rates, skips, bias = -torch.rand(heads) - 0.05, torch.randn(heads), torch.randn(heads) - 2
    pool = 0.3 * torch.randn(6, heads, size, state)
    scan = {"D": skips, "dt_bias": bias, "cu_seqlens": ends, "dt_softplus": True}
    order = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), ends.diff()).unsqueeze(0)
    cut = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(ends, chunk, 104)
    more = {"chunk_size": chunk, "seq_idx": order, "chunk_indices": cut[0], "chunk_offsets": cut[1]}
    more |= {"return_varlen_states": True, "state_dtype": torch.float32}
    results = []
    for run, own in ((ssd_combined.mamba_chunk_scan_combined, more), (here_mamba2.scan, {})):
        out = torch.empty_like(x)
        results.append((out, run(x, dt, rates, *shared, out=out, initial_states=pool[1:4], **scan, **own)))
    found = {"scan": apart(*zip(*results, strict=True))}

    # A decode step of three requests; numbers of a head are the same for all of it.
    slots, each = torch.tensor([4, 1, 2], dtype=torch.int32), [t[:, None].expand(-1, size) for t in (skips, bias)]
    step = (x[0, :3], dt[0, :3, :, None].expand(-1, -1, size), rates[:, None, None].expand(-1, size, state))
    step += (shared[0][0, :3], shared[1][0, :3], each[0])
    more, results = {"dt_bias": each[1], "dt_softplus": True, "state_batch_indices": slots}, []
    for run in (mamba_ssm.selective_state_update, here_mamba2.scan_step):
        ours, out = pool.clone(), torch.empty(3, heads, size)
        run(ours, *step, out=out, **more)
        results.append((out, ours))
    return found | {"scan step": apart(*zip(*results, strict=True))}


if __name__ == "__main__":
    print(json.dumps(gated_delta() | convolution() | verified() | kept() | norms() | window() | kda() | mamba2()))
