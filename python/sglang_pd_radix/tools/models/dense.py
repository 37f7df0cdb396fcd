"""Models of one kind of layer throughout: Qwen3, and DeepSeek V3 with dense MLPs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import ATTENTION_GAIN, EMBED_STD, LOGIT_STD, MLP_GAIN, ROPE_THETA, SCORE_STD, Tensor, Weights, ones


def embeddings(weights: Weights, shape: ModelShape, vocabulary: Vocabulary) -> dict[str, Tensor]:
    head = np.zeros((shape.vocab, shape.hidden), dtype=np.float32)
    emitted = vocabulary.emitted
    head[emitted.start : emitted.stop] = weights.linear(len(emitted), shape.hidden, LOGIT_STD)
    return {
        "model.embed_tokens.weight": weights.matrix(shape.vocab, shape.hidden, EMBED_STD),
        "model.norm.weight": ones(shape.hidden),
        "lm_head.weight": head,
    }


def attention(weights: Weights, shape: ModelShape, prefix: str, score: Tensor) -> dict[str, Tensor]:
    """Full attention. score: the weights of the norms of each head's q and k, (head_dim,)."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        f"{prefix}.q_proj.weight": weights.linear(query, shape.hidden),
        f"{prefix}.k_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.v_proj.weight": weights.linear(key_value, shape.hidden),
        f"{prefix}.o_proj.weight": weights.linear(shape.hidden, query, ATTENTION_GAIN),
        f"{prefix}.q_norm.weight": score,
        f"{prefix}.k_norm.weight": score,
    }


def mlp(weights: Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.mlp.gate_proj.weight": weights.linear(shape.intermediate, shape.hidden),
        f"{prefix}.mlp.up_proj.weight": weights.linear(shape.intermediate, shape.hidden),
        # silu(gate) * up of unit normals has rms 0.6.
        f"{prefix}.mlp.down_proj.weight": weights.linear(shape.hidden, shape.intermediate, MLP_GAIN / 0.6),
        f"{prefix}.input_layernorm.weight": ones(shape.hidden),
        f"{prefix}.post_attention_layernorm.weight": ones(shape.hidden),
    }


def common_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def qwen3(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    # Per-head norms bring q and k to rms 1 whatever the projections do, so their weights set the score.
    score = ones(shape.head_dim, math.sqrt(SCORE_STD))
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= attention(weights, shape, f"{prefix}.self_attn", score)
        tensors |= mlp(weights, shape, prefix)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": shape.head_dim,
        "max_window_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "sliding_window": None,
        "use_sliding_window": False,
        **common_config(shape),
    }
    return config, tensors


def mla(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """DeepSeek V3's attention, with dense MLPs throughout: no expert kernel is needed to run it."""
    return mla_of(Weights(seed), shape, vocabulary)


def mla_of(weights: Weights, shape: ModelShape, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = embeddings(weights, shape, vocabulary)
    dim, heads, rank = shape.head_dim, shape.heads, shape.kv_rank
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        tensors |= {
            f"{attention}.q_a_proj.weight": weights.linear(shape.query_rank, shape.hidden),
            f"{attention}.q_a_layernorm.weight": ones(shape.query_rank),
            # The keys come out at rms 1, so the queries' gain is the deviation of the scores.
            f"{attention}.q_b_proj.weight": weights.linear(heads * 2 * dim, shape.query_rank, SCORE_STD),
            f"{attention}.kv_a_proj_with_mqa.weight": weights.linear(rank + dim, shape.hidden),
            f"{attention}.kv_a_layernorm.weight": ones(rank),
            f"{attention}.kv_b_proj.weight": weights.linear(heads * 2 * dim, rank),
            f"{attention}.o_proj.weight": weights.linear(shape.hidden, heads * dim, ATTENTION_GAIN),
        }
        tensors |= mlp(weights, shape, prefix)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": rank,
        "q_lora_rank": shape.query_rank,
        "qk_nope_head_dim": dim,
        "qk_rope_head_dim": dim,
        "v_head_dim": dim,
        "num_key_value_heads": heads,
        # Every layer comes before the first one with experts. The rest of the block only has to be there.
        "first_k_dense_replace": shape.layers,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        **common_config(shape),
    }
    return config, tensors
