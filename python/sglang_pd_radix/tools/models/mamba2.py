"""Layouts of ``pd-radix make-model`` with Mamba2 layers. Gains are as in hybrid.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dense import common_config, embeddings
from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import ATTENTION_GAIN, MLP_GAIN, SCORE_STD, Tensor, Weights, ones

_HEADS, _GROUPS, _CONV_WIDTH = 8, 2, 4
_CHUNK = 64
# A head forgets a part exp(-dt |A|) per token, with dt = 2 |A| about: over 400 tokens to 1.4. All write as much.
_SLOWEST, _FASTEST = 0.035, 0.6


def _sizes(shape: ModelShape) -> tuple[int, int]:
    """Numbers of a token's inputs, and of its B (or C)."""
    return _HEADS * (shape.head_dim // 2), _GROUPS * (shape.head_dim // 2)


def _mamba(weights: Weights, shape: ModelShape, prefix: str, gain: float) -> dict[str, Tensor]:
    inner, shared = _sizes(shape)
    rates = np.geomspace(_SLOWEST, _FASTEST, _HEADS, dtype=np.float32)
    return {
        f"{prefix}.in_proj.weight": weights.linear(2 * inner + 2 * shared + _HEADS, shape.hidden),
        f"{prefix}.conv1d.weight": weights.linear(inner + 2 * shared, _CONV_WIDTH)[:, None],
        f"{prefix}.conv1d.bias": np.zeros(inner + 2 * shared, dtype=np.float32),
        f"{prefix}.A_log": np.log(rates),
        # The inverse of softplus.
        f"{prefix}.dt_bias": np.log(np.expm1(2 * rates)),
        f"{prefix}.D": ones(_HEADS),
        f"{prefix}.norm.weight": ones(inner),
        f"{prefix}.out_proj.weight": weights.linear(shape.hidden, inner, gain),
    }


def _attention(weights: Weights, shape: ModelShape, prefix: str, gain: float) -> dict[str, Tensor]:
    """Full attention without norms: the keys come out at rms 1, so the queries' gain is the deviation of the scores."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        f"{prefix}.q_proj.weight": weights.linear(query, shape.hidden, SCORE_STD),
        f"{prefix}.k_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.v_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.o_proj.weight": weights.linear(shape.hidden, query, gain),
    }


def falcon_h1(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Falcon-H1: each layer has full attention and Mamba2 side by side."""
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    tensors["model.final_layernorm.weight"] = tensors.pop("model.norm.weight")
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= _attention(weights, shape, f"{prefix}.self_attn", ATTENTION_GAIN)
        tensors |= _mamba(weights, shape, f"{prefix}.mamba", ATTENTION_GAIN)
        tensors |= {
            f"{prefix}.feed_forward.gate_proj.weight": weights.linear(shape.intermediate, shape.hidden),
            f"{prefix}.feed_forward.up_proj.weight": weights.linear(shape.intermediate, shape.hidden),
            f"{prefix}.feed_forward.down_proj.weight": weights.linear(shape.hidden, shape.intermediate, MLP_GAIN / 0.6),
            f"{prefix}.input_layernorm.weight": ones(shape.hidden),
            f"{prefix}.pre_ff_layernorm.weight": ones(shape.hidden),
        }
    config = {
        **common_config(shape),
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        "mamba_d_ssm": _sizes(shape)[0],
        "mamba_n_heads": _HEADS,
        "mamba_d_head": shape.head_dim // 2,
        "mamba_n_groups": _GROUPS,
        "mamba_d_state": shape.head_dim // 2,
        "mamba_d_conv": _CONV_WIDTH,
        "mamba_chunk_size": _CHUNK,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "projectors_bias": False,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        **dict.fromkeys(
            (
                "lm_head_multiplier",
                "embedding_multiplier",
                "key_multiplier",
                "attention_in_multiplier",
                "attention_out_multiplier",
                "ssm_in_multiplier",
                "ssm_out_multiplier",
            ),
            1.0,
        ),
    }
    return config, tensors


def nemotron_h(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Nemotron-H: of two layers one has Mamba2, the other full attention without positions; between them MLPs.

    What it calls a layer is either of the three.
    """
    weights = Weights(seed)
    tensors = {
        name.replace("model.embed_tokens", "backbone.embeddings").replace("model.norm", "backbone.norm_f"): tensor
        for name, tensor in embeddings(weights, shape, vocabulary).items()
    }
    pattern = ("M-*-" * shape.layers)[: 2 * shape.layers]
    for layer, kind in enumerate(pattern):
        prefix = f"backbone.layers.{layer}"
        tensors[f"{prefix}.norm.weight"] = ones(shape.hidden)
        if kind == "M":
            tensors |= _mamba(weights, shape, f"{prefix}.mixer", ATTENTION_GAIN)
        elif kind == "*":
            tensors |= _attention(weights, shape, f"{prefix}.mixer", ATTENTION_GAIN)
        else:
            tensors |= {
                f"{prefix}.mixer.up_proj.weight": weights.linear(shape.intermediate, shape.hidden),
                # The square of relu of unit normals has rms 1.22.
                f"{prefix}.mixer.down_proj.weight": weights.linear(shape.hidden, shape.intermediate, MLP_GAIN / 1.22),
            }
    config = {
        **common_config(shape),
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "layer_norm_epsilon": 1e-6,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": _HEADS,
        "mamba_head_dim": shape.head_dim // 2,
        "n_groups": _GROUPS,
        "mamba_n_groups": _GROUPS,
        "ssm_state_size": shape.head_dim // 2,
        "conv_kernel": _CONV_WIDTH,
        "mamba_d_conv": _CONV_WIDTH,
        "chunk_size": _CHUNK,
        "residual_in_fp32": False,
    }
    return config, tensors
