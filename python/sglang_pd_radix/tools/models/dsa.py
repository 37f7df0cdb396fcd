"""DeepSeek V3.2: the attention of "mla", to the tokens that an indexer selects.

The selection is discontinuous, so nothing that rounding changes may decide it. Each token has a code of `CODE` signs in
the first numbers of its embedding, which no layer writes to. An index key is the token's code. An index query is the
code of its own token, permuted, with signs and with sizes that fp8 has exactly. What reaches fp8 is 3% away from where
rounding goes the other way, scores are whole numbers times one factor, and equal ones are equal to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_pd_radix.errors import PdRadixError

from .dense import mla_of
from .shape import ModelShape
from .tokenizer import Vocabulary
from .weights import EMBED_STD, Tensor, Weights, ones

CODE = 64
TOPK = 32
_INDEX_HEADS, _INDEX_DIM = 2, 128
# Of an entry of a token's code to one of the compressed query of attention, which the same norm makes smaller. At 20,
# what the rest of a query does to the size of its code is below 1%.
_CODE_GAIN = 20.0
# What a layer adds to the mean square of the rest of the hidden state, measured.
_ADDED = 10.2


def dsa(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if shape.hidden < 2 * CODE or shape.head_dim > CODE:
        raise PdRadixError(f"--arch dsa needs --hidden {2 * CODE} or more and --head-dim {CODE} or less")
    weights = Weights(seed)
    config, tensors = mla_of(weights, shape, vocabulary)
    embed = tensors["model.embed_tokens.weight"]
    embed[:, :CODE] = np.copysign(EMBED_STD, embed[:, :CODE])
    embed[:, 0] = EMBED_STD  # what the weights of the index heads are made from: the same for all tokens
    for layer in range(shape.layers):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.o_proj.weight"][:CODE] = 0
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:CODE] = 0
        # The root mean square of what enters the layer.
        size = math.sqrt(EMBED_STD**2 + layer * _ADDED * (1 - CODE / shape.hidden))
        tensors |= _indexer(weights, shape, f"{attention}.indexer")
        tensors |= _query(shape, attention, tensors, size)
    config |= {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "q_lora_rank": shape.query_rank + CODE,
        "index_head_dim": _INDEX_DIM,
        "index_n_heads": _INDEX_HEADS,
        "index_topk": TOPK,
    }
    return config, tensors


def _query(shape: ModelShape, attention: str, tensors: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    """The compressed query: that of "mla", and behind it the code, `_CODE_GAIN` times as large."""
    down, up = (tensors[f"{attention}.{name}.weight"] for name in ("q_a_proj", "q_b_proj"))
    code = np.eye(CODE, shape.hidden, dtype=np.float32) * np.float32(_CODE_GAIN * size / EMBED_STD)
    back = np.float32(_CODE_GAIN / _code_size(shape))
    return {
        f"{attention}.q_a_proj.weight": np.concatenate([down, code]),
        f"{attention}.q_a_layernorm.weight": ones(shape.query_rank + CODE),
        f"{attention}.q_b_proj.weight": np.pad(up * back, ((0, 0), (0, CODE))),
    }


def _code_size(shape: ModelShape) -> float:
    """The size of the code in the compressed query behind its norm, of which it is nearly all."""
    return math.sqrt((shape.query_rank + CODE) / CODE)


def _indexer(weights: Weights, shape: ModelShape, indexer: str) -> dict[str, Tensor]:
    """The numbers that have a position are 0. The others pass a Hadamard matrix here, which the engine's takes back."""
    hadamard = np.ones((1, 1), dtype=np.float32)
    while len(hadamard) < CODE:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    query = np.zeros((_INDEX_HEADS, _INDEX_DIM, shape.query_rank + CODE), dtype=np.float32)
    for head in query:
        order, sign, part = weights.matrix(3, CODE, 1)
        mixed = np.eye(CODE, dtype=np.float32)[np.argsort(order, kind="stable")] * np.copysign(np.float32(1), sign)
        # 8 to 15, which have four bits; 15 in any case, so that all queries have one scale.
        sizes = 8 + np.floor((part / math.sqrt(3) + 1) * 4).astype(np.float32)
        sizes[0] = 15
        head[-CODE:, -CODE:] = hadamard @ (sizes[:, None] * mixed)
    # The engine's matrix is of 128 rows, with this one twice in each.
    query *= np.float32(math.sqrt(_INDEX_DIM) / CODE / _code_size(shape))
    key = np.zeros((_INDEX_DIM, shape.hidden), dtype=np.float32)
    key[-CODE:, :CODE] = hadamard
    norm = ones(_INDEX_DIM)
    norm[:-CODE] = 0
    gate = np.zeros((_INDEX_HEADS, shape.hidden), dtype=np.float32)
    gate[:, 0] = 1
    return {
        f"{indexer}.wq_b.weight": query.reshape(-1, shape.query_rank + CODE),
        f"{indexer}.wk.weight": key,
        f"{indexer}.k_norm.weight": norm,
        f"{indexer}.k_norm.bias": ones(_INDEX_DIM, 0),
        f"{indexer}.weights_proj.weight": gate,
    }
