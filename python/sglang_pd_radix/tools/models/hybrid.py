"""Layouts of ``pd-radix make-model`` with layers that keep more than KV, or not all of it.

Sizes that the options do not name follow from those that they do. As in dense.py, what enters a layer has rms 1,
and what it adds has that of ``_ATTENTION_GAIN`` or ``_MLP_GAIN``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .dense import attention, common_config, embeddings, mlp
from .eagle import LATER_GAIN, draft_input
from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import ATTENTION_GAIN, MLP_GAIN, ROPE_THETA, SCORE_STD, Tensor, Weights, ones, rms

# A head of linear attention forgets a part exp(-softplus(bias)) per token: over these, between 1.4 and 400 tokens.
_SLOWEST, _FASTEST = -6.0, 0.0
EXPERTS = 4
_CONV_WIDTH = 4


# Of a layer with linear attention, and of those the sizes that its options have no names for.
_KEY_HEADS, VALUE_HEADS = 4, 8


def gated_attention(weights: Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    """Full attention with a gate for each head, whose norms count from 1."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    score = np.full(shape.head_dim, math.sqrt(SCORE_STD) - 1, dtype=np.float32)
    return {
        # Each head's query and its gate, whose sigmoid is 0.54 in rms.
        f"{prefix}.q_proj.weight": weights.linear(2 * query, shape.hidden),
        f"{prefix}.k_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.v_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.o_proj.weight": weights.linear(shape.hidden, query, ATTENTION_GAIN / 0.54),
        f"{prefix}.q_norm.weight": score,
        f"{prefix}.k_norm.weight": score,
    }


def linear_sizes(shape: ModelShape) -> tuple[int, int]:
    """Numbers of all keys (or queries) and of all values of a token."""
    return _KEY_HEADS * (shape.head_dim // 2), VALUE_HEADS * (shape.head_dim // 2)


def linear_attention(weights: Weights, shape: ModelShape, prefix: str, inputs: dict[str, int]) -> dict[str, Tensor]:
    """``inputs``: what projects a layer's input is called, and the numbers that it makes."""
    keys, values = linear_sizes(shape)
    return {
        **{f"{prefix}.{name}.weight": weights.linear(rows, shape.hidden) for name, rows in inputs.items()},
        f"{prefix}.conv1d.weight": weights.linear(2 * keys + values, _CONV_WIDTH)[:, None],
        f"{prefix}.A_log": np.zeros(VALUE_HEADS, dtype=np.float32),
        f"{prefix}.dt_bias": np.linspace(_SLOWEST, _FASTEST, VALUE_HEADS, dtype=np.float32),
        f"{prefix}.norm.weight": ones(shape.head_dim // 2),
        # Its input is of rms 1 times the silu of a unit normal.
        f"{prefix}.out_proj.weight": weights.linear(shape.hidden, values, ATTENTION_GAIN / 0.6),
    }


def linear_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": _CONV_WIDTH,
        "linear_key_head_dim": shape.head_dim // 2,
        "linear_value_head_dim": shape.head_dim // 2,
        "linear_num_key_heads": _KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
    }


def experts(weights: Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    hidden, inner = shape.hidden, shape.intermediate // 4
    tensors = {
        f"{prefix}.gate.weight": weights.linear(EXPERTS, hidden),
        f"{prefix}.shared_expert_gate.weight": weights.linear(1, hidden),
    }
    for expert in (*(f"experts.{i}" for i in range(EXPERTS)), "shared_expert"):
        tensors |= {
            f"{prefix}.{expert}.gate_proj.weight": weights.linear(inner, hidden),
            f"{prefix}.{expert}.up_proj.weight": weights.linear(inner, hidden),
            f"{prefix}.{expert}.down_proj.weight": weights.linear(hidden, inner, MLP_GAIN / 0.6),
        }
    return tensors


def expert_config(shape: ModelShape) -> dict[str, int]:
    return {
        "moe_intermediate_size": shape.intermediate // 4,
        "shared_expert_intermediate_size": shape.intermediate // 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
    }


def qwen3_next(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Qwen3-Next: of two layers one has linear attention (GDN), the other a KV cache; experts throughout."""
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    hidden = shape.hidden
    keys, values = linear_sizes(shape)
    zero_norm = np.zeros  # the weights of its norms count from 1
    tensors["model.norm.weight"] = zero_norm(hidden, dtype=np.float32)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        if layer % 2:
            tensors |= gated_attention(weights, shape, f"{prefix}.self_attn")
        else:
            inputs = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * VALUE_HEADS}
            tensors |= linear_attention(weights, shape, f"{prefix}.linear_attn", inputs)
        tensors |= {
            f"{prefix}.input_layernorm.weight": zero_norm(hidden, dtype=np.float32),
            f"{prefix}.post_attention_layernorm.weight": zero_norm(hidden, dtype=np.float32),
            **experts(weights, shape, f"{prefix}.mlp"),
        }
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        "partial_rotary_factor": 1.0,
        **linear_config(shape),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **expert_config(shape),
        "norm_topk_prob": True,
        **common_config(shape),
    }
    return config, tensors


# The layer that decides about half of the tokens, and the draft's: the first with attention. What it reads is what the
# draft reads, but for what the layer before it adds.
_DECISIVE = 1
_BEFORE_GAIN = 0.03


def qwen3_next_mtp(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`qwen3_next` with a draft in the same files (multi-token prediction), as Qwen3-Next and Qwen3.5 have one.

    The draft is the target's second layer on the token and a little of the target's hidden state, like the one of
    ``eagle``. The first layer, which the draft does not have, and the later ones add less than in `qwen3_next`.
    """
    config, tensors = qwen3_next(shape, seed, vocabulary)
    add_mtp(shape, seed, tensors)
    return config, tensors


def add_mtp(shape: ModelShape, seed: int, tensors: dict[str, Tensor], model: str = "model") -> None:
    """Make of a model's tensors, which are called ``model``.., those of one that has a draft in itself."""
    for name in tensors:
        outputs = name.endswith((".out_proj.weight", ".o_proj.weight", ".down_proj.weight", ".experts.down_proj"))
        if outputs and not name.startswith(f"{model}.layers.{_DECISIVE}."):
            before = name.startswith(f"{model}.layers.0.")
            tensors[name] *= np.float32(_BEFORE_GAIN if before else LATER_GAIN)
    # The draft has a norm before its layer. Of tokens of rms 1 it is the identity.
    embed = tensors[f"{model}.embed_tokens.weight"]
    embed /= rms(embed)
    norm = np.zeros(shape.hidden, dtype=np.float32)
    layer = f"{model}.layers.{_DECISIVE}."
    tensors |= {f"mtp.layers.0.{name[len(layer) :]}": t for name, t in tensors.items() if name.startswith(layer)}
    tensors |= {f"mtp.{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    tensors["mtp.fc.weight"] = draft_input(shape, seed)


def delta_attention(weights: Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    """Kimi's linear attention: each number of a key has a decay of its own."""
    size, total = shape.head_dim // 2, linear_sizes(shape)[1]
    projected = {f"{prefix}.{name}_proj.weight": weights.linear(total, shape.hidden) for name in "qkv"}
    # Decay and output gate come through few numbers.
    for name in "fg":
        projected[f"{prefix}.{name}_a_proj.weight"] = weights.linear(size, shape.hidden)
        projected[f"{prefix}.{name}_b_proj.weight"] = weights.linear(total, size)
    convolutions = {f"{prefix}.{name}_conv1d.weight": weights.linear(total, _CONV_WIDTH)[:, None] for name in "qkv"}
    return {
        **projected,
        **convolutions,
        f"{prefix}.b_proj.weight": weights.linear(VALUE_HEADS, shape.hidden),
        f"{prefix}.A_log": np.zeros((1, 1, VALUE_HEADS, 1), dtype=np.float32),
        f"{prefix}.dt_bias": np.linspace(_SLOWEST, _FASTEST, total, dtype=np.float32),
        f"{prefix}.o_norm.weight": ones(size),
        # The sigmoid of a unit normal is 0.54 in rms.
        f"{prefix}.o_proj.weight": weights.linear(shape.hidden, total, ATTENTION_GAIN / 0.54),
    }


def kimi_linear(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Kimi-Linear with dense MLPs: of two layers one has linear attention (KDA), the other MLA without positions."""
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    size = shape.head_dim // 2
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        if layer % 2:
            tensors |= latent_attention(weights, shape, f"{prefix}.self_attn", size)
        else:
            tensors |= delta_attention(weights, shape, f"{prefix}.self_attn")
        tensors |= mlp(weights, shape, prefix)
    numbers = range(1, shape.layers + 1)
    config = {
        **common_config(shape),
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "head_dim": size,
        "kv_lora_rank": shape.kv_rank,
        "mla_use_nope": True,
        # It has none of these; on a CPU the engine asks for their size.
        "moe_intermediate_size": 64,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "qk_nope_head_dim": size,
        "qk_rope_head_dim": size,
        "v_head_dim": size,
        "linear_attn_config": {
            "kda_layers": list(numbers[::2]),
            "full_attn_layers": list(numbers[1::2]),
            "head_dim": size,
            "num_heads": VALUE_HEADS,
            "short_conv_kernel_size": _CONV_WIDTH,
        },
    }
    return config, tensors


def latent_attention(weights: Weights, shape: ModelShape, prefix: str, size: int) -> dict[str, Tensor]:
    """MLA whose queries are not compressed. size: of a head's value, and of both parts of its key."""
    return {
        # The keys come out at rms 1, so the queries' gain is the deviation of the scores.
        f"{prefix}.q_proj.weight": weights.linear(shape.heads * 2 * size, shape.hidden, SCORE_STD),
        f"{prefix}.kv_a_proj_with_mqa.weight": weights.linear(shape.kv_rank + size, shape.hidden),
        f"{prefix}.kv_a_layernorm.weight": ones(shape.kv_rank),
        f"{prefix}.kv_b_proj.weight": weights.linear(shape.heads * 2 * size, shape.kv_rank),
        f"{prefix}.o_proj.weight": weights.linear(shape.hidden, shape.heads * size, ATTENTION_GAIN),
    }


# Short enough that prompts of tests are several times as long.
_WINDOW = 128


def step3p5(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Step 3.5 with dense MLPs: of two layers one attends to a sliding window and has a KV pool of its own."""
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    # The weights of its norms count from 1.
    none = np.zeros(shape.hidden, dtype=np.float32)
    score = np.full(shape.head_dim, math.sqrt(SCORE_STD) - 1, dtype=np.float32)
    tensors["model.norm.weight"] = none
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= attention(weights, shape, f"{prefix}.self_attn", score)
        tensors |= mlp(weights, shape, prefix)
        tensors |= {f"{prefix}.{norm}.weight": none for norm in ("input_layernorm", "post_attention_layernorm")}
    config = {
        **common_config(shape),
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
        "rope_theta": [ROPE_THETA] * shape.layers,
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
