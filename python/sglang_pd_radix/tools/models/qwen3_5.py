"""Qwen3.5 of ``pd-radix make-model``: layers like those of Qwen3-Next behind a vision tower.

Names and sizes are those of the released checkpoints, as far as ``ModelShape`` names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import hybrid
from .dense import common_config, embeddings, mlp
from .shape import ModelShape
from .tokenizer import IMAGE, TURN_END, VIDEO, VISION_END, VISION_START, Vocabulary
from .weights import EMBED_STD, ROPE_THETA, Tensor, Weights, ones

# Of a head's numbers, those that turn with the position: as of released checkpoints.
_ROTARY_PART = 0.25
# The tower's: patches of 16 x 16, of which 2 x 2 become one token.
_PATCH, _MERGED, _FRAMES = 16, 2, 2
_VISION_HIDDEN, _VISION_HEADS, _VISION_LAYERS, _VISION_INNER = 64, 4, 2, 128
# Positions it has learnt, in a square.
_VISION_POSITIONS = 64
_VISION_GAIN = 0.3


def _rotary_sections(shape: ModelShape) -> list[int]:
    """How many pairs of a head turn with the time, the height and the width of a token's place."""
    pairs = int(shape.head_dim * _ROTARY_PART) // 2
    width = pairs // 3
    return [pairs - 2 * width, width, width]


def _vision(weights: Weights, shape: ModelShape) -> dict[str, Tensor]:
    """The tower. What it makes of an image is of the size of the words' embeddings, and differs from image to image."""

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> dict[str, Tensor]:
        return {
            f"{name}.weight": weights.linear(rows, columns, gain),
            f"{name}.bias": np.zeros(rows, dtype=np.float32),
        }

    def norm(name: str) -> dict[str, Tensor]:
        return {
            f"{name}.weight": ones(_VISION_HIDDEN),
            f"{name}.bias": np.zeros(_VISION_HIDDEN, dtype=np.float32),
        }

    size, tower = _VISION_HIDDEN, "model.visual"
    patch = linear(f"{tower}.patch_embed.proj", size, 3 * _FRAMES * _PATCH**2)
    patch[f"{tower}.patch_embed.proj.weight"] = patch[f"{tower}.patch_embed.proj.weight"].reshape(
        size, 3, _FRAMES, _PATCH, _PATCH
    )
    tensors = {**patch, f"{tower}.pos_embed.weight": weights.linear(_VISION_POSITIONS, size)}
    for layer in range(_VISION_LAYERS):
        block = f"{tower}.blocks.{layer}"
        tensors |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        tensors |= linear(f"{block}.attn.qkv", 3 * size, size)
        tensors |= linear(f"{block}.attn.proj", size, size, _VISION_GAIN)
        tensors |= linear(f"{block}.mlp.linear_fc1", _VISION_INNER, size)
        tensors |= linear(f"{block}.mlp.linear_fc2", size, _VISION_INNER, _VISION_GAIN)
    joined = size * _MERGED**2
    tensors |= norm(f"{tower}.merger.norm")
    tensors |= linear(f"{tower}.merger.linear_fc1", joined, joined)
    # Its input is of rms 0.65: the gelu of a unit normal.
    tensors |= linear(f"{tower}.merger.linear_fc2", shape.hidden, joined, EMBED_STD / 0.65)
    return tensors


def _joined_experts(weights: Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    """The experts as one tensor: of each its gate above what goes through it, (experts, 2 * inner, hidden)."""
    tensors = hybrid.experts(weights, shape, prefix)

    def taken(name: str) -> Tensor:
        return np.stack([tensors.pop(f"{prefix}.experts.{i}.{name}_proj.weight") for i in range(hybrid.EXPERTS)])

    tensors[f"{prefix}.experts.gate_up_proj"] = np.concatenate((taken("gate"), taken("up")), axis=1)
    tensors[f"{prefix}.experts.down_proj"] = taken("down")
    return tensors


def qwen3_5(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Qwen3.5 with dense MLPs, without the draft that released checkpoints have; see `qwen3_5_mtp`."""
    return _build(shape, seed, vocabulary, experts=False)


def qwen3_5_moe(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same with experts."""
    return _build(shape, seed, vocabulary, experts=True)


def _build(
    shape: ModelShape, seed: int, vocabulary: Vocabulary, experts: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = Weights(seed)
    text = "model.language_model"
    tensors = {
        name.replace("model.", f"{text}.", 1): tensor for name, tensor in embeddings(weights, shape, vocabulary).items()
    }
    keys, values = hybrid.linear_sizes(shape)
    # The weights of its norms count from 1.
    none = np.zeros(shape.hidden, dtype=np.float32)
    tensors[f"{text}.norm.weight"] = none
    for layer in range(shape.layers):
        prefix = f"{text}.layers.{layer}"
        if layer % 2:
            tensors |= hybrid.gated_attention(weights, shape, f"{prefix}.self_attn")
        else:
            heads = hybrid.VALUE_HEADS
            inputs = {
                "in_proj_qkv": 2 * keys + values,
                "in_proj_z": values,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
            tensors |= hybrid.linear_attention(weights, shape, f"{prefix}.linear_attn", inputs)
        tensors |= _joined_experts(weights, shape, f"{prefix}.mlp") if experts else mlp(weights, shape, prefix)
        tensors |= {f"{prefix}.{norm}.weight": none for norm in ("input_layernorm", "post_attention_layernorm")}
    tensors |= _vision(weights, shape)
    return _config(shape, vocabulary, experts), tensors


def _config(shape: ModelShape, vocabulary: Vocabulary, experts: bool) -> dict[str, Any]:
    common = common_config(shape)
    del common["rope_scaling"], common["rope_theta"]
    special = vocabulary.special_ids
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    return {
        "architectures": [f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": False,
        "image_token_id": special[IMAGE],
        "video_token_id": special[VIDEO],
        "vision_start_token_id": special[VISION_START],
        "vision_end_token_id": special[VISION_END],
        "text_config": {
            **common,
            **hybrid.linear_config(shape),
            **(hybrid.expert_config(shape) if experts else {}),
            "model_type": f"{kind}_text",
            "head_dim": shape.head_dim,
            "num_key_value_heads": shape.kv_heads,
            "attn_output_gate": True,
            "partial_rotary_factor": _ROTARY_PART,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "partial_rotary_factor": _ROTARY_PART,
                "mrope_section": _rotary_sections(shape),
                "mrope_interleaved": True,
            },
            "eos_token_id": special[TURN_END],
            "dtype": "float32",
        },
        "vision_config": {
            "model_type": kind,
            "depth": _VISION_LAYERS,
            "hidden_size": _VISION_HIDDEN,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": _VISION_INNER,
            "num_heads": _VISION_HEADS,
            "in_channels": 3,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGED,
            "temporal_patch_size": _FRAMES,
            "out_hidden_size": shape.hidden,
            "num_position_embeddings": _VISION_POSITIONS,
            "deepstack_visual_indexes": [],
        },
    }


def qwen3_5_mtp(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`qwen3_5` with a draft in the same files, made as that of `hybrid_models.qwen3_next_mtp`."""
    return _with_draft(shape, seed, *qwen3_5(shape, seed, vocabulary))


def qwen3_5_moe_mtp(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`qwen3_5_moe` with such a draft."""
    return _with_draft(shape, seed, *qwen3_5_moe(shape, seed, vocabulary))


def _with_draft(
    shape: ModelShape, seed: int, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    hybrid.add_mtp(shape, seed, tensors, "model.language_model")
    config["text_config"]["mtp_num_hidden_layers"] = 1
    return config, tensors


def processor_files() -> dict[str, dict[str, Any]]:
    """What is done to images and videos: sizes in pixels, of which a token stands for 32 x 32."""
    common = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": _PATCH,
        "temporal_patch_size": _FRAMES,
        "merge_size": _MERGED,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    side = _PATCH * _MERGED
    return {
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4 * side**2, "longest_edge": 1024 * side**2},
        },
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4 * side**2, "longest_edge": 1024 * side**2},
        },
    }
