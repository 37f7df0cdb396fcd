"""Linear attention on CPU hosts: the torch forms are the engine's Triton kernels and transformers' reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_pd_radix.supplied.cpu_host import linear_attention


def test_it_is_what_the_engines_kernels_compute():
    env = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    script = Path(__file__).with_name("gdn_on_triton.py")
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert max(found.values()) < 3e-6 and found["kept"] == 0, found
    assert len(found) == 8


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


def test_speculative_steps_are_refused():
    one = torch.zeros(1, 3, 1, 4)
    with pytest.raises(NotImplementedError, match="speculative decoding"):
        linear_attention.gated_delta_step(
            torch.zeros(1),
            torch.zeros(1),
            one,
            one,
            one,
            torch.zeros(3, 1),
            torch.zeros(3, 1),
            torch.zeros(2, 1, 4, 4),
            torch.tensor([1]),
            torch.tensor([0, 3]),
        )
