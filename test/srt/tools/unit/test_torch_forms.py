"""Linear attention and sliding windows on CPU hosts are what the engine's Triton kernels and transformers compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_pd_radix.supplied.cpu_host import linear_attention, mamba2
from sglang_pd_radix.supplied.cpu_host.attention import extend


@pytest.mark.thorough  # It imports the engine once more.
def test_it_is_what_the_engines_kernels_compute():
    env = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    script = Path(__file__).with_name("on_triton.py")
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert max(found.values()) < 3e-6 and found["kept"] == found["taken"] == 0, found
    assert len(found) == 17


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_it_is_what_transformers_computes(tokens):
    reference = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(tokens)
    q, k, v = torch.randn(1, tokens, 4, 16), torch.randn(1, tokens, 4, 16), torch.randn(1, tokens, 4, 8)
    g, beta = linear_attention.gating(torch.randn(4), torch.randn(tokens, 4), torch.randn(tokens, 4), torch.randn(4))
    state = torch.randn(1, 4, 8, 16)
    out, end, begins = linear_attention.gated_delta_rule(q, k, v, g, beta, state, torch.tensor([0, tokens]))
    expected, last = reference.torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, state.transpose(2, 3), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(end, last.transpose(2, 3), atol=2e-6, rtol=1e-5)
    assert begins.shape == (1, -(-tokens // 64), 4, 8, 16)
    torch.testing.assert_close(begins[0, 0], state[0])


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_mamba2_is_what_its_definition_says(tokens):
    """Token by token, from a state and from none; groups of heads share what they read and write by."""
    torch.manual_seed(tokens)
    heads, size, groups, width = 4, 8, 2, 6
    x, dt = torch.randn(1, tokens, heads, size), torch.randn(1, tokens, heads)
    B, C = (torch.randn(1, tokens, groups, width) for _ in "BC")
    A, D, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads) - 1
    before, ends = torch.randn(1, heads, size, width), torch.tensor([0, tokens])
    for start in (before, None):
        out, state = torch.empty_like(x), torch.zeros_like(before[0]) if start is None else start[0].clone()
        end = mamba2.scan(x, dt, A, B, C, D, bias, ends, out, start, dt_softplus=True)
        for token in range(tokens):
            for head in range(heads):
                step = torch.nn.functional.softplus(dt[0, token, head] + bias[head])
                value, group = x[0, token, head], head // 2
                state[head] = (step * A[head]).exp() * state[head] + step * torch.outer(value, B[0, token, group])
                read = state[head] @ C[0, token, group] + D[head] * value
                torch.testing.assert_close(out[0, token, head], read, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(end[0], state, atol=1e-5, rtol=1e-5)


def test_drafts_that_are_trees_are_refused():
    table, one = torch.zeros(1, 3), torch.zeros(1, 3, 1, 4)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        linear_attention.gated_delta_step(
            *(None, None, one, one, one, None, None, None, torch.tensor([1]), torch.tensor([0, 3])),
            retrieve_parent_token=table,
        )
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        linear_attention.causal_conv_step(one, one, one, None, None, torch.tensor([1]), retrieve_next_token=table)


@pytest.mark.parametrize("window", [6, -1])
@pytest.mark.parametrize("own_pool", [True, False])
@pytest.mark.parametrize("decodes", [True, False])
def test_windows_of_several_requests(monkeypatch, decodes, own_pool, window):
    """Blocks of queries, requests of different length, and slots of a pool of their own; layers without one too."""
    torch.manual_seed(1)
    monkeypatch.setattr(extend, "BLOCK", 4)
    heads, kv_heads, size, slots = 4, 2, 8, 64
    table = torch.randperm(slots)[:60].reshape(3, 20).int()
    mapping = torch.randperm(slots)
    keys, values = torch.randn(slots, kv_heads, size), torch.randn(slots, kv_heads, size)
    pool = SimpleNamespace(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
    if own_pool:
        pool.layers_mapping, pool.full_to_swa_index_mapping = {0: (0, True)}, mapping
    rows, lens = [2, 0, 1], [5, 20, 13]
    prefixes = [n - 1 for n in lens] if decodes else [0, 3, 9]
    tokens = sum(lens) - sum(prefixes)
    batch = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lens),
        extend_prefix_lens=torch.tensor(prefixes),
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        qk_head_dim=size,
        v_head_dim=size,
        sliding_window_size=window,
        scaling=0.3,
        attn_type=AttentionType.DECODER,
    )
    q = torch.randn(tokens, heads * size)
    out = extend.forward(q, None, None, layer, batch, save_kv_cache=False).view(tokens, heads, size)
    at = 0
    for row, start, end in zip(rows, prefixes, lens, strict=True):
        for position in range(start, end):
            seen = table[row, max(0, position - window) if window > 0 else 0 : position + 1].long()
            seen = mapping[seen] if own_pool and window > 0 else seen
            for head in range(heads):
                key, value = keys[seen, head // 2], values[seen, head // 2]
                weight = torch.softmax(0.3 * key @ q[at].view(heads, size)[head], 0)
                torch.testing.assert_close(out[at, head], weight @ value, atol=1e-6, rtol=1e-5)
            at += 1
    assert at == tokens
