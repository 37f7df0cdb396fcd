"""Layouts of ``pd-radix make-model`` with layers that keep more than KV, or not all of it.

Sizes that the options do not name follow from those that they do. As in make_model.py, what enters a layer has rms 1,
and what it adds has that of ``_ATTENTION_GAIN`` or ``_MLP_GAIN``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import make_model as base

# A head of linear attention forgets a part exp(-softplus(bias)) per token: over these, between 1.4 and 400 tokens.
_SLOWEST, _FASTEST = -6.0, 0.0
_EXPERTS = 4
_CONV_WIDTH = 4


def qwen3_next(
    shape: base.ModelShape, seed: int, vocabulary: base.Vocabulary
) -> tuple[dict[str, Any], dict[str, base.Tensor]]:
    """Qwen3-Next: of two layers one has linear attention (GDN), the other a KV cache; experts throughout."""
    weights = base._Weights(seed)
    tensors = base._embeddings(weights, shape, vocabulary)
    hidden, dim = shape.hidden, shape.head_dim
    key_heads, value_heads, linear_dim = 4, 8, dim // 2
    keys, values = key_heads * linear_dim, value_heads * linear_dim
    query, key_value = shape.heads * dim, shape.kv_heads * dim
    zero_norm = np.zeros  # the weights of its norms count from 1
    tensors["model.norm.weight"] = zero_norm(hidden, dtype=np.float32)
    score = np.full(dim, math.sqrt(base._SCORE_STD) - 1, dtype=np.float32)
    bias = np.linspace(_SLOWEST, _FASTEST, value_heads, dtype=np.float32)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        if layer % 2:
            attention = f"{prefix}.self_attn"
            tensors |= {
                # Each head's query and its gate, whose sigmoid is 0.54 in rms.
                f"{attention}.q_proj.weight": weights.linear(2 * query, hidden),
                f"{attention}.k_proj.weight": weights.linear(key_value, hidden),
                f"{attention}.v_proj.weight": weights.linear(key_value, hidden),
                f"{attention}.o_proj.weight": weights.linear(hidden, query, base._ATTENTION_GAIN / 0.54),
                f"{attention}.q_norm.weight": score,
                f"{attention}.k_norm.weight": score,
            }
        else:
            linear = f"{prefix}.linear_attn"
            tensors |= {
                f"{linear}.in_proj_qkvz.weight": weights.linear(2 * keys + 2 * values, hidden),
                f"{linear}.in_proj_ba.weight": weights.linear(2 * value_heads, hidden),
                f"{linear}.conv1d.weight": weights.linear(2 * keys + values, _CONV_WIDTH)[:, None],
                f"{linear}.A_log": np.zeros(value_heads, dtype=np.float32),
                f"{linear}.dt_bias": bias,
                f"{linear}.norm.weight": base._ones(linear_dim),
                # Its input is of rms 1 times the silu of a unit normal.
                f"{linear}.out_proj.weight": weights.linear(hidden, values, base._ATTENTION_GAIN / 0.6),
            }
        inner = shape.intermediate // 4
        tensors |= {
            f"{prefix}.input_layernorm.weight": zero_norm(hidden, dtype=np.float32),
            f"{prefix}.post_attention_layernorm.weight": zero_norm(hidden, dtype=np.float32),
            f"{prefix}.mlp.gate.weight": weights.linear(_EXPERTS, hidden),
            f"{prefix}.mlp.shared_expert_gate.weight": weights.linear(1, hidden),
        }
        for expert in (*(f"experts.{i}" for i in range(_EXPERTS)), "shared_expert"):
            tensors |= {
                f"{prefix}.mlp.{expert}.gate_proj.weight": weights.linear(inner, hidden),
                f"{prefix}.mlp.{expert}.up_proj.weight": weights.linear(inner, hidden),
                f"{prefix}.mlp.{expert}.down_proj.weight": weights.linear(hidden, inner, base._MLP_GAIN / 0.6),
            }
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": dim,
        "num_key_value_heads": shape.kv_heads,
        "partial_rotary_factor": 1.0,
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": _CONV_WIDTH,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate // 4,
        "shared_expert_intermediate_size": shape.intermediate // 4,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **base._common_config(shape),
    }
    return config, tensors


# The layer that decides about half of the tokens, and the draft's: the first with attention. What it reads is what the
# draft reads, but for what the layer before it adds.
_DECISIVE = 1
_BEFORE_GAIN = 0.03


def qwen3_next_mtp(
    shape: base.ModelShape, seed: int, vocabulary: base.Vocabulary
) -> tuple[dict[str, Any], dict[str, base.Tensor]]:
    """`qwen3_next` with a draft in the same files (multi-token prediction), as Qwen3-Next and Qwen3.5 have one.

    The draft is the target's second layer on the token and a little of the target's hidden state, like the one of
    ``eagle``. The first layer, which the draft does not have, and the later ones add less than in `qwen3_next`.
    """
    config, tensors = qwen3_next(shape, seed, vocabulary)
    for name in tensors:
        outputs = name.endswith((".out_proj.weight", ".o_proj.weight", ".down_proj.weight"))
        if outputs and not name.startswith(f"model.layers.{_DECISIVE}."):
            before = name.startswith("model.layers.0.")
            tensors[name] *= np.float32(_BEFORE_GAIN if before else base._LATER_GAIN)
    # The draft has a norm before its layer. Of tokens of rms 1 it is the identity.
    embed = tensors["model.embed_tokens.weight"]
    embed /= base.rms(embed)
    norm = np.zeros(shape.hidden, dtype=np.float32)
    layer = f"model.layers.{_DECISIVE}."
    tensors |= {f"mtp.layers.0.{name[len(layer) :]}": t for name, t in tensors.items() if name.startswith(layer)}
    tensors |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    tensors["mtp.fc.weight"] = base.draft_input(shape, seed)
    return config, tensors


# Short enough that prompts of tests are several times as long.
_WINDOW = 128


def step3p5(
    shape: base.ModelShape, seed: int, vocabulary: base.Vocabulary
) -> tuple[dict[str, Any], dict[str, base.Tensor]]:
    """Step 3.5 with dense MLPs: of two layers one attends to a sliding window and has a KV pool of its own."""
    weights = base._Weights(seed)
    tensors = base._embeddings(weights, shape, vocabulary)
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The weights of its norms count from 1.
    none = np.zeros(shape.hidden, dtype=np.float32)
    score = np.full(shape.head_dim, math.sqrt(base._SCORE_STD) - 1, dtype=np.float32)
    tensors["model.norm.weight"] = none
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        tensors |= {
            f"{attention}.q_proj.weight": weights.linear(query, shape.hidden),
            f"{attention}.k_proj.weight": weights.linear(key_value, shape.hidden),
            f"{attention}.v_proj.weight": weights.linear(key_value, shape.hidden),
            f"{attention}.o_proj.weight": weights.linear(shape.hidden, query, base._ATTENTION_GAIN),
            f"{attention}.q_norm.weight": score,
            f"{attention}.k_norm.weight": score,
        }
        tensors |= base._mlp(weights, shape, prefix)
        tensors |= {f"{prefix}.{norm}.weight": none for norm in ("input_layernorm", "post_attention_layernorm")}
    config = {
        **base._common_config(shape),
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "head_dim": shape.head_dim,
        "num_attention_groups": shape.kv_heads,
        "num_key_value_heads": shape.kv_heads,
        "max_seq_len": shape.max_positions,
        "sliding_window": _WINDOW,
        "layer_types": ["full_attention", "sliding_attention"] * (shape.layers // 2),
        "attention_other_setting": {"num_attention_heads": shape.heads, "num_attention_groups": shape.kv_heads},
        "partial_rotary_factors": [1.0] * shape.layers,
        "rope_theta": [base._ROPE_THETA] * shape.layers,
        "yarn_only_types": [],
        "use_head_wise_attn_gate": False,
        "swiglu_limits": [0.0] * shape.layers,
        "swiglu_limits_shared": [0.0] * shape.layers,
        # None of its layers: it has no experts.
        "moe_layers_enum": "99",
        "need_fp32_gate": True,
        "use_moe_router_bias": True,
        "moe_router_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    return config, tensors
