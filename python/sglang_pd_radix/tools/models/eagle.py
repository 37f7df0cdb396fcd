"""A target for speculative decoding with EAGLE, and its draft."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dense import common_config, embeddings, mlp
from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import ATTENTION_GAIN, SCORE_STD, Tensor, Weights, rms

# What the layers after the first add, in parts of what they add elsewhere: about half of the tokens are the first's.
LATER_GAIN = 0.15
# How much of the target's hidden state a draft takes for its input, beside the token.
_HIDDEN_GAIN = 0.1


def _llama_layer(weights: Weights, shape: ModelShape, prefix: str, gain: float) -> dict[str, Tensor]:
    """A layer whose scores and outputs have the deviations of the other architectures; ``gain``: part of the latter."""
    attention, query, key_value = f"{prefix}.self_attn", shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    around = mlp(weights, shape, prefix)
    around[f"{prefix}.mlp.down_proj.weight"] *= np.float32(gain)
    return {
        f"{attention}.q_proj.weight": weights.linear(query, shape.hidden, SCORE_STD),
        f"{attention}.k_proj.weight": weights.linear(key_value, shape.hidden),
        f"{attention}.v_proj.weight": weights.linear(key_value, shape.hidden),
        f"{attention}.o_proj.weight": weights.linear(shape.hidden, query, ATTENTION_GAIN * gain),
        **around,
    }


def draft_input(shape: ModelShape, seed: int) -> Tensor:
    """What makes a draft's input of the token's embedding and the target's hidden state: (hidden, 2 * hidden)."""
    hidden = Weights(seed + 1).linear(shape.hidden, shape.hidden, _HIDDEN_GAIN)
    return np.concatenate((np.eye(shape.hidden, dtype=np.float32), hidden), axis=1)


def target(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A target for speculative decoding, whose first layer decides about half of its tokens; see `draft`."""
    weights = Weights(seed)
    tensors = embeddings(weights, shape, vocabulary)
    embed = tensors["model.embed_tokens.weight"]
    # The draft has no norm before its layer. Of tokens of rms 1 it is the identity.
    embed /= rms(embed)
    for layer in range(shape.layers):
        tensors |= _llama_layer(weights, shape, f"model.layers.{layer}", LATER_GAIN if layer else 1.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        **common_config(shape),
    }
    return config, tensors


def draft(
    shape: ModelShape, seed: int, config: dict[str, Any], target: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE draft for `target`'s target: its first layer, on the token and a little of the target's hidden state.

    A draft that knows nothing has no token accepted and shows nothing. This one proposes what the first layer would
    say; what it takes of the hidden states, and with them its KV, must be right for as many tokens to be accepted.
    """
    layer = "model.layers.0."
    tensors = {f"layers.0.{name[len(layer) :]}": t for name, t in target.items() if name.startswith(layer)}
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = draft_input(shape, seed)
    tensors["fc.bias"] = np.zeros(shape.hidden, dtype=np.float32)
    return {**config, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}, tensors
