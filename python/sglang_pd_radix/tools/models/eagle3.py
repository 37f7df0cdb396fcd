"""``pd-radix make-model --arch eagle3``: a target, and a draft that cannot do without its hidden states.

The hidden size has two halves. The first holds what is said next: the token, and what all layers but the first make of
it. The second is a memory: what the first layer writes, and the keys and values of the second are made from. The second
layer decides about half of the tokens, and the draft is that layer. Of past tokens it has the memory in the hidden
states it is given, and in nothing else: with those of other tokens, or with keys and values made from them, hardly a
token of it is accepted.

An EAGLE3 draft differs from a layer of the target in three ways, each of which is made up for here:

- Beside each token it has the hidden state of the one before. So it asks as from one position further on.
- What its layer adds to is the hidden state, and the token goes into its attention only. So some heads, idle in the
  target, attend to their own token alone and put it in the place of the hidden state's first half.
- From the second step of a draft on, the hidden state is its own output. So its first half is taken away (as well as
  its rms is known), and the second stays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_pd_radix.errors import PdRadixError

from . import eagle
from .eagle import LATER_GAIN
from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import ROPE_THETA, Tensor, ones, rms

# The layer that the draft stands for.
_DECISIVE = "model.layers.1."
# Seen over prompts of 20 to 1500 random words, of each half: the memory, and what the decisive layer leaves.
_MEMORY_RMS = 3.1
_OUTPUT_RMS = 3.7
# What the decisive layer adds, in parts of what layers add elsewhere. With more, the rms of what it leaves varies more
# from token to token, and drafts are worse from their second step on.
_DECISIVE_GAIN = 0.7
# How sharply a head that attends to its own token does so: 8 times that is its score with itself, that with others.
_OWN_SCORE = 6.0


def _half(shape: ModelShape) -> int:
    return shape.hidden // 2


def _both(first_rms: float) -> float:
    """The rms of both halves, where that of the first is this."""
    return math.sqrt((first_rms**2 + _MEMORY_RMS**2) / 2)


def _own_heads(shape: ModelShape) -> range:
    """The key/value heads that hold a token as it is: the last ones, as many as it takes."""
    count = -(-_half(shape) // shape.head_dim)
    if shape.layers < 4 or shape.hidden % 2 or count >= shape.kv_heads:
        raise PdRadixError(
            f"--arch eagle3 needs 4 layers or more, an even hidden size and more than {count} --kv-heads (as many as "
            f"hold half of it), not --layers {shape.layers} --hidden {shape.hidden} --kv-heads {shape.kv_heads}"
        )
    return range(shape.kv_heads - count, shape.kv_heads)


def _queries(shape: ModelShape, head: int) -> int:
    """The first row, in the queries, of those of a key/value head."""
    return head * (shape.heads // shape.kv_heads) * shape.head_dim


def target(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A target whose decisive layer takes of past tokens what the first layer has written."""
    half, live = _half(shape), _queries(shape, _own_heads(shape).start)
    config, tensors = eagle.target(shape, seed, vocabulary)
    embed = tensors["model.embed_tokens.weight"]
    embed[:, half:] = 0
    embed[:, :half] /= rms(embed[:, :half])
    said_by = ones(shape.hidden, math.sqrt(2))
    said_by[half:] = 0
    tensors["model.norm.weight"] = said_by
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:half] = 0
        decisive = tensors[f"{_DECISIVE}{name}.weight"]
        decisive *= np.float32(_DECISIVE_GAIN / LATER_GAIN)
        decisive[half:] = 0
    output = tensors[f"{_DECISIVE}self_attn.o_proj.weight"]
    output *= np.float32(math.sqrt(output.shape[1] / live))
    output[:, live:] = 0
    # Of what goes in, each half has its share of the rms.
    whole = _both(1)
    for name, part, size in (("q", 0, 1.0), ("k", half, _MEMORY_RMS), ("v", half, _MEMORY_RMS)):
        weight = tensors[f"{_DECISIVE}self_attn.{name}_proj.weight"]
        weight[:, part : part + half] *= np.float32(math.sqrt(2) * whole / size)
        weight[:, half - part : shape.hidden - part] = 0
    tensors[f"{_DECISIVE}post_attention_layernorm.weight"] = said_by * np.float32(whole)
    return config, tensors


def _one_further(weight: Tensor, shape: ModelShape) -> Tensor:
    """Queries as the rotary embedding would have them one position further on; ``weight``: (heads * head_dim, n)."""
    pairs = shape.head_dim // 2
    angle = (ROPE_THETA ** (-np.arange(pairs) / pairs))[:, None]
    real, imaginary = weight.reshape(-1, 2, pairs, weight.shape[1]).swapaxes(0, 1).astype(np.float64)
    turned = real * np.cos(angle) - imaginary * np.sin(angle), imaginary * np.cos(angle) + real * np.sin(angle)
    return np.stack(turned, axis=1).reshape(weight.shape).astype(np.float32)


def draft(
    shape: ModelShape, seed: int, config: dict[str, Any], target: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The draft of `target`. It knows the tokens only that the target ever says, by numbers of its own."""
    hidden, half, dim, own = shape.hidden, _half(shape), shape.head_dim, _own_heads(shape)
    tensors = {
        f"midlayer.{name[len(_DECISIVE) :]}": tensor.copy()
        for name, tensor in target.items()
        if name.startswith(_DECISIVE)
    }
    tensors["midlayer.hidden_norm.weight"] = ones(hidden)
    attention = "midlayer.self_attn."
    query, key, value = (tensors[f"{attention}{name}_proj.weight"] for name in "qkv")
    # In the target both halves share a norm; here the token has one, and the memory another.
    whole = _both(1)
    query = np.concatenate((_one_further(query, shape) / (math.sqrt(2) * whole), np.zeros_like(query)), axis=1)
    share = _MEMORY_RMS / (math.sqrt(2) * whole)
    key, value = (np.concatenate((np.zeros_like(w), w * share), axis=1) for w in (key, value))
    output = tensors[f"{attention}o_proj.weight"]
    live = _queries(shape, own.start)
    query[live:] = key[own.start * dim :] = value[own.start * dim :] = 0
    for part, head in enumerate(own):
        at = np.arange(part * dim, min((part + 1) * dim, half))
        held, asked = head * dim + at - at[0], _queries(shape, head) + at - at[0]
        query[asked, at] = key[held, at] = math.sqrt(_OWN_SCORE / 2)
        value[held, at], value[held, hidden + at] = 1 / math.sqrt(2), -_both(_OUTPUT_RMS)
        output[at, asked] = 1
    for name, weight in (("q", query), ("k", key), ("v", value)):
        tensors[f"{attention}{name}_proj.weight"] = weight.astype(np.float32)
    memory = np.eye(hidden, dtype=np.float32)
    memory[:half] = 0
    tensors["fc.weight"] = np.concatenate([memory / np.float32(3)] * 3, axis=1)
    tensors["norm.weight"] = target["model.norm.weight"]
    head_weight = target["lm_head.weight"]
    said = np.flatnonzero(head_weight.any(axis=1))
    tensors["lm_head.weight"] = head_weight[said]
    # What is added to a number of the draft's to get the target's, and which tokens have one.
    tensors["d2t"] = said - np.arange(len(said))
    tensors["t2d"] = head_weight.any(axis=1)
    config = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(said),
        "eagle_config": {
            "use_aux_hidden_state": True,
            # Whose outputs it reads; the engine's own choice takes deeper models.
            "eagle_aux_hidden_state_layer_ids": [0, (shape.layers - 2) // 2, shape.layers - 2],
        },
    }
    return config, tensors
