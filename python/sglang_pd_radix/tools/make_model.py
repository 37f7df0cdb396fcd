"""``pd-radix make-model``: a small random-weight model that is good at showing wrong KV.

The model has no knowledge, so it is no use for chatting. It is built for tests, demos and benchmarks of the KV path:

- **Offline and deterministic.** Weights come from the raw bits of numpy's PCG64, whose stream is fixed by contract, and
  the tokenizer from word lists in this file: the same arguments give the same bytes on every machine.
- **Sensitive.** Attention is peaked and depends on content, and the layers outweigh the token embedding, so the next
  token depends on the whole context. Different prompts give different greedy answers that do not fall into loops, and a
  KV page that holds wrong values changes the answer.
- **Stable under rounding.** The layers do not amplify float32 rounding much, so two correct engines (another batch
  size, chunk size or TP degree) still agree token for token.
- **Text that survives the round trip.** The model only ever emits word tokens (" bako"), each of which is one
  pre-tokenizer unit. Any answer, decoded and sent back as text in the next turn, encodes to the ids that were
  generated. Byte tokens and special tokens exist for the user's text and the template; their ``lm_head`` rows are zero,
  so their logit is 0 while the best of thousands of words is far above it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_pd_radix.errors import PdRadixError

Tensor = np.ndarray[Any, np.dtype[np.float32]]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Where a model sees: what an image or a video stands between, and what is put there for each part of it.
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)

# The assistant's text is trimmed and put behind one space: a client that strips the answer it got changes nothing, and
# the text is encoded as it was generated, word by word with a leading space.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- ' ' ~ ((message['content'] or '') | trim) }}"
    "{%- else %}"
    "{{- message['content'] or '' }}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)

# The same where a content can be a list of texts and images.
VISION_CHAT_TEMPLATE = (
    "{%- macro text(content) %}"
    "{%- if content is string %}{{- content }}"
    "{%- else %}"
    "{%- for part in content or [] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}"
    "{%- elif part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{%- endmacro %}"
) + CHAT_TEMPLATE.replace("message['content'] or ''", "text(message['content'])")

# Common English words, so that ordinary prompts are not spelled out byte by byte.
_ENGLISH = """
a about above after again all also always an and any are as ask at away back bad be because been before began begin
best better between big black blue book both box boy bring build but buy by call came can car carry change city clear
close cold color come copy could country cut day did different do does done door down draw each early earth east easy
eat end engine enough even ever every example explain eye face fact fall family far fast father feel few find fire
first five follow food for form found four free from full game gave get girl give go good got great green grow had
half hand hard has have he head hear heart help helpful her here high him his home horse hot hour house how hundred i
idea if in inside into is it its just keep key kind king knew know land language large last late learn leave left less
let letter life light like line list little live long look made main make man many map may me mean men might mile mind
minute money month moon more morning most mother mountain move much music must my name near need never new next night
no north not note nothing now number of off often old on once one only open or order other our out over own page paper
part pass people picture place plain plan plant play please point poor power press pretty problem public pull put
question quick quiet rain ran read ready real reason red remember rest right river road rock room round rule run said
same saw say school sea second see seem send sentence set seven several shall she ship short should show side simple
since sing six size sky sleep slow small snow so some song soon sound south stand star start state stay step still
stop story street strong study such summer sun sure system table take talk tell ten than that the their them then
there these they thing think this those though thought thousand three through time to today together told too took top
town translate travel tree true try turn two under until up us use user very voice wait walk want war warm was watch
water way we week well went were west what wheel when where which while white who whole why will wind winter with
without wood word work world would write year yes yet you young your assistant tool
"""
_ONSETS = tuple("bdfghjklmnprstvz") + ("br", "dr", "fl", "gr", "kl", "st")
_VOWELS = tuple("aeiou")
_CODAS = ("", "n", "r", "l", "s", "k", "m")

# One unit per match, everything is covered: a word with at most one leading space, a digit, a run of signs, one space.
_PRE_TOKENIZER = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. ``kv_bytes_per_token`` is what one cached token occupies in float32.

    For "mla", ``head_dim`` is the size of each head's value, of the part of its key that has no position and of the one
    that has (shared by all heads); ``kv_rank`` and ``query_rank`` are the sizes of the compressed forms.
    """

    arch: str = "qwen3"
    layers: int = 4
    hidden: int = 256
    heads: int = 0  # 0: 16, and 8 for "mla", which costs a CPU several times as much per head
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 4096
    max_positions: int = 32768
    kv_rank: int = 256
    query_rank: int = 128

    def __post_init__(self) -> None:
        if self.heads == 0:
            object.__setattr__(self, "heads", 8 if self.arch == "mla" else 16)

    @property
    def kv_bytes_per_token(self) -> int:
        per_layer = self.kv_rank + self.head_dim if self.arch == "mla" else 2 * self.kv_heads * self.head_dim
        layers = self.layers // 2 if self.arch.startswith(("qwen3-next", "qwen3.5")) else self.layers
        return layers * per_layer * 4


# --------------------------------------------------------------------------------------------------------- tokenizer


def _byte_alphabet() -> list[str]:
    """The printable stand-in for each byte value 0..255 that byte-level tokenizers use (GPT-2's convention)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256))
    return [chr(b) if b in visible else chr(256 + next(hidden)) for b in range(256)]


def _invented_words() -> Iterator[str]:
    """Two-syllable words in an order that mixes the syllables, without end (for a vocabulary of any sensible size)."""
    syllables = [o + v + c for c in _CODAS for v in _VOWELS for o in _ONSETS]
    count = len(syllables)
    for step in range(count):
        for first in range(count):
            yield syllables[first] + syllables[(first * 7 + step * 131 + 17) % count]


@dataclass(frozen=True)
class Vocabulary:
    """Token strings in id order (byte alphabet), and the ids that the model may emit: words with a leading space."""

    tokens: tuple[str, ...]
    emitted: range
    special: tuple[str, ...] = SPECIAL_TOKENS

    @property
    def special_ids(self) -> dict[str, int]:
        first = len(self.tokens) - len(self.special)
        return {token: first + i for i, token in enumerate(self.special)}


def make_vocabulary(size: int, special: tuple[str, ...] = SPECIAL_TOKENS) -> Vocabulary:
    """Lay out ``size`` tokens: 256 bytes, English words without leading space, words with one, special tokens."""
    alphabet = _byte_alphabet()
    space = alphabet[0x20]
    english = list(dict.fromkeys(_ENGLISH.split()))
    known = set(alphabet)
    bare = [w for w in dict.fromkeys(form for word in english for form in (word, word.capitalize())) if w not in known]
    spaced_capitals = [space + word.capitalize() for word in english]
    head = [*alphabet, *bare, *spaced_capitals]
    room = size - len(head) - len(special)
    if room < 2 * len(english):
        raise PdRadixError(f"--vocab {size} is too small: at least {size - room + 2 * len(english)} tokens are needed")
    words = dict.fromkeys(english)
    for word in _invented_words():
        if len(words) == room:
            break
        words.setdefault(word)
    if len(words) < room:
        raise PdRadixError(f"--vocab {size} is too large: at most {size - room + len(words)} tokens can be made")
    tokens = (*head, *(space + word for word in words), *special)
    return Vocabulary(tokens, range(len(head), len(head) + room), special)


def tokenizer_files(vocabulary: Vocabulary, max_positions: int) -> dict[str, dict[str, Any]]:
    """The contents of ``tokenizer.json`` and ``tokenizer_config.json``."""
    special = vocabulary.special_ids
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, index in special.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _PRE_TOKENIZER}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        # Without merges a unit is either one token of the vocabulary (ignore_merges) or its bytes: nothing in between,
        # which is what makes decode and encode exact inverses on emitted words.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens) if token not in special},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in added},
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": VISION_CHAT_TEMPLATE if IMAGE in special else CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


# ----------------------------------------------------------------------------------------------------------- weights


class _Weights:
    """Uniform random matrices of a given standard deviation, from one fixed stream of bits."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def matrix(self, rows: int, columns: int, std: float) -> Tensor:
        """A ``rows`` x ``columns`` float32 matrix with independent entries of mean 0 and deviation ``std``."""
        count = rows * columns
        raw = self._bits.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        unit = (raw.astype(np.float32) + np.float32(0.5)) / np.float32(32768) - np.float32(1)
        return (unit * np.float32(std * math.sqrt(3))).reshape(rows, columns)

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        """A linear layer that turns an input of rms 1 into an output of rms ``gain``."""
        return self.matrix(out_features, in_features, gain / math.sqrt(in_features))


def _ones(size: int, value: float = 1.0) -> Tensor:
    return np.full(size, value, dtype=np.float32)


# Deviation of the attention scores. At 1.5, a query over 1000 tokens attends to about 1000 / e^2.25 = 100 of them. More
# makes single tokens count more, and float32 rounding too: the two grow together, and this is where 32 tokens of answer
# show almost any changed KV while rounding flips about one token in 200 000.
_SCORE_STD = 1.5
_EMBED_STD = 0.7
_ATTENTION_GAIN = 3.0
_MLP_GAIN = 3.0  # what keeps answers free of repetition: the next token follows from the last one by no simple rule
_LOGIT_STD = 4.0
_ROPE_THETA = 10000.0


def _embeddings(weights: _Weights, shape: ModelShape, vocabulary: Vocabulary) -> dict[str, Tensor]:
    head = np.zeros((shape.vocab, shape.hidden), dtype=np.float32)
    emitted = vocabulary.emitted
    head[emitted.start : emitted.stop] = weights.linear(len(emitted), shape.hidden, _LOGIT_STD)
    return {
        "model.embed_tokens.weight": weights.matrix(shape.vocab, shape.hidden, _EMBED_STD),
        "model.norm.weight": _ones(shape.hidden),
        "lm_head.weight": head,
    }


def _mlp(weights: _Weights, shape: ModelShape, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.mlp.gate_proj.weight": weights.linear(shape.intermediate, shape.hidden),
        f"{prefix}.mlp.up_proj.weight": weights.linear(shape.intermediate, shape.hidden),
        # silu(gate) * up of unit normals has rms 0.6.
        f"{prefix}.mlp.down_proj.weight": weights.linear(shape.hidden, shape.intermediate, _MLP_GAIN / 0.6),
        f"{prefix}.input_layernorm.weight": _ones(shape.hidden),
        f"{prefix}.post_attention_layernorm.weight": _ones(shape.hidden),
    }


def _qwen3(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights = _Weights(seed)
    tensors = _embeddings(weights, shape, vocabulary)
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        tensors |= {
            f"{attention}.q_proj.weight": weights.linear(query, shape.hidden),
            f"{attention}.k_proj.weight": weights.linear(key_value, shape.hidden),
            f"{attention}.v_proj.weight": weights.linear(key_value, shape.hidden),
            f"{attention}.o_proj.weight": weights.linear(shape.hidden, query, _ATTENTION_GAIN),
            # Per-head norms bring q and k to rms 1 whatever the projections do, so their weights set the score.
            f"{attention}.q_norm.weight": _ones(shape.head_dim, math.sqrt(_SCORE_STD)),
            f"{attention}.k_norm.weight": _ones(shape.head_dim, math.sqrt(_SCORE_STD)),
        }
        tensors |= _mlp(weights, shape, prefix)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": shape.head_dim,
        "max_window_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "sliding_window": None,
        "use_sliding_window": False,
        **_common_config(shape),
    }
    return config, tensors


def _mla(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """DeepSeek V3's attention, with dense MLPs throughout: no expert kernel is needed to run it."""
    weights = _Weights(seed)
    tensors = _embeddings(weights, shape, vocabulary)
    dim, heads, rank = shape.head_dim, shape.heads, shape.kv_rank
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        tensors |= {
            f"{attention}.q_a_proj.weight": weights.linear(shape.query_rank, shape.hidden),
            f"{attention}.q_a_layernorm.weight": _ones(shape.query_rank),
            # The keys come out at rms 1, so the queries' gain is the deviation of the scores.
            f"{attention}.q_b_proj.weight": weights.linear(heads * 2 * dim, shape.query_rank, _SCORE_STD),
            f"{attention}.kv_a_proj_with_mqa.weight": weights.linear(rank + dim, shape.hidden),
            f"{attention}.kv_a_layernorm.weight": _ones(rank),
            f"{attention}.kv_b_proj.weight": weights.linear(heads * 2 * dim, rank),
            f"{attention}.o_proj.weight": weights.linear(shape.hidden, heads * dim, _ATTENTION_GAIN),
        }
        tensors |= _mlp(weights, shape, prefix)
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
        **_common_config(shape),
    }
    return config, tensors


# What the layers after the first add, in parts of what they add elsewhere: about half of the tokens are the first's.
_LATER_GAIN = 0.15
# How much of the target's hidden state a draft takes for its input, beside the token.
_HIDDEN_GAIN = 0.1


def _llama_layer(weights: _Weights, shape: ModelShape, prefix: str, gain: float) -> dict[str, Tensor]:
    """A layer whose scores and outputs have the deviations of the other architectures; ``gain``: part of the latter."""
    attention, query, key_value = f"{prefix}.self_attn", shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = _mlp(weights, shape, prefix)
    mlp[f"{prefix}.mlp.down_proj.weight"] *= np.float32(gain)
    return {
        f"{attention}.q_proj.weight": weights.linear(query, shape.hidden, _SCORE_STD),
        f"{attention}.k_proj.weight": weights.linear(key_value, shape.hidden),
        f"{attention}.v_proj.weight": weights.linear(key_value, shape.hidden),
        f"{attention}.o_proj.weight": weights.linear(shape.hidden, query, _ATTENTION_GAIN * gain),
        **mlp,
    }


def rms(rows: Tensor) -> Tensor:
    """The root mean square of each row, (rows, 1)."""
    return np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=1, keepdims=True)).astype(np.float32)


def draft_input(shape: ModelShape, seed: int) -> Tensor:
    """What makes a draft's input of the token's embedding and the target's hidden state: (hidden, 2 * hidden)."""
    hidden = _Weights(seed + 1).linear(shape.hidden, shape.hidden, _HIDDEN_GAIN)
    return np.concatenate((np.eye(shape.hidden, dtype=np.float32), hidden), axis=1)


def _eagle(shape: ModelShape, seed: int, vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A target for speculative decoding, whose first layer decides about half of its tokens; see `eagle_draft`."""
    weights = _Weights(seed)
    tensors = _embeddings(weights, shape, vocabulary)
    embed = tensors["model.embed_tokens.weight"]
    # The draft has no norm before its layer. Of tokens of rms 1 it is the identity.
    embed /= rms(embed)
    for layer in range(shape.layers):
        tensors |= _llama_layer(weights, shape, f"model.layers.{layer}", _LATER_GAIN if layer else 1.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads,
        **_common_config(shape),
    }
    return config, tensors


def eagle_draft(
    shape: ModelShape, seed: int, config: dict[str, Any], target: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE draft for `_eagle`'s target: its first layer, on the token and a little of the target's hidden state.

    A draft that knows nothing has no token accepted and shows nothing. This one proposes what the first layer would
    say; what it takes of the hidden states, and with them its KV, must be right for as many tokens to be accepted.
    """
    layer = "model.layers.0."
    tensors = {f"layers.0.{name[len(layer) :]}": t for name, t in target.items() if name.startswith(layer)}
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = draft_input(shape, seed)
    tensors["fc.bias"] = np.zeros(shape.hidden, dtype=np.float32)
    return {**config, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}, tensors


def _common_config(shape: ModelShape) -> dict[str, Any]:
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
        "rope_theta": _ROPE_THETA,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


Builder = Callable[["ModelShape", int, Vocabulary], tuple[dict[str, Any], dict[str, Tensor]]]


def _elsewhere(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that itself needs this one."""

    def build(*args: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __package__), name)(*args)

    return build


_BUILDERS: dict[str, Builder] = {
    "qwen3": _qwen3,
    "mla": _mla,
    "eagle": _eagle,
    "eagle3": _elsewhere("eagle3_model", "target"),
    "qwen3-next": _elsewhere("hybrid_models", "qwen3_next"),
    "qwen3-next-mtp": _elsewhere("hybrid_models", "qwen3_next_mtp"),
    "qwen3.5": _elsewhere("qwen3_5_model", "qwen3_5"),
    "qwen3.5-mtp": _elsewhere("qwen3_5_model", "qwen3_5_mtp"),
    "qwen3.5-moe": _elsewhere("qwen3_5_model", "qwen3_5_moe"),
    "qwen3.5-moe-mtp": _elsewhere("qwen3_5_model", "qwen3_5_moe_mtp"),
    "step3p5": _elsewhere("hybrid_models", "step3p5"),
}
_DRAFTS = {"eagle": eagle_draft, "eagle3": _elsewhere("eagle3_model", "draft")}
# Those that see images, and the files that say how.
_SEEING = dict.fromkeys(
    (a for a in _BUILDERS if a.startswith("qwen3.5")), _elsewhere("qwen3_5_model", "processor_files")
)
# Where a model of those with a draft has it.
DRAFT = "draft"


# ------------------------------------------------------------------------------------------------------------- files


_SIZES = {
    "layers": "decoder layers",
    "hidden": "hidden size",
    "heads": "query heads; 8 for mla",
    "kv_heads": "key/value heads (qwen3, eagle, eagle3)",
    "head_dim": "size of one head",
    "kv_rank": "size of the compressed key and value (mla)",
    "query_rank": "size of the compressed query (mla)",
    "intermediate": "size of the MLP",
    "vocab": "tokens in the vocabulary",
    "max_positions": "longest context in tokens",
}


def check_shape(shape: ModelShape) -> None:
    """Raise PdRadixError naming the first size that cannot work."""
    if shape.arch not in _BUILDERS:
        raise PdRadixError(f"--arch {shape.arch}: not one of {', '.join(_BUILDERS)}")
    for name in _SIZES:
        if getattr(shape, name) < 1:
            raise PdRadixError(f"{_option(name)} {getattr(shape, name)}: must be at least 1")
    if shape.arch != "mla" and shape.heads % shape.kv_heads:
        raise PdRadixError(f"--heads {shape.heads} must be a multiple of --kv-heads {shape.kv_heads}")
    if shape.head_dim % 2:
        raise PdRadixError(f"--head-dim {shape.head_dim} must be even: the rotary embedding turns pairs")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_model(directory: str | os.PathLike[str], shape: ModelShape | None = None, seed: int = 0) -> Path:
    """Write the model into ``directory`` (made if missing) and return its path.

    Files of an earlier model in that directory are replaced; every other non-empty directory is refused, so that no
    user's files are mixed with it. Raises PdRadixError.
    """
    from safetensors.numpy import save

    shape = shape or ModelShape()
    check_shape(shape)
    if not 0 <= seed < 2**64:
        raise PdRadixError(f"--seed {seed}: must be between 0 and 2^64 - 1")
    target = Path(directory)
    seeing = shape.arch in _SEEING
    vocabulary = make_vocabulary(shape.vocab, SPECIAL_TOKENS + VISION_TOKENS if seeing else SPECIAL_TOKENS)
    special = vocabulary.special_ids
    config, tensors = _BUILDERS[shape.arch](shape, seed, vocabulary)
    ids = {"bos_token_id": None, "eos_token_id": special[TURN_END], "pad_token_id": special[END_OF_TEXT]}
    documents = {
        "config.json": {**config, **ids, "dtype": "float32", "torch_dtype": "float32"},
        "generation_config.json": {**ids, "do_sample": False},
        **tokenizer_files(vocabulary, shape.max_positions),
        **(_SEEING[shape.arch]() if seeing else {}),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        ours = {*documents, "model.safetensors", DRAFT if shape.arch in _DRAFTS else ""}
        foreign = sorted(p.name for p in target.iterdir() if p.name not in ours)
        if foreign:
            raise PdRadixError(f"{target} holds other files ({foreign[0]}): give a new or empty directory")
        for name, document in documents.items():
            _write(target / name, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        _write(target / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        if shape.arch in _DRAFTS:
            draft_config, draft = _DRAFTS[shape.arch](shape, seed, documents["config.json"], tensors)
            (target / DRAFT).mkdir(exist_ok=True)
            _write(target / DRAFT / "config.json", (json.dumps(draft_config, indent=1) + "\n").encode())
            _write(target / DRAFT / "model.safetensors", save(draft, metadata={"format": "pt"}))
    except OSError as error:
        raise PdRadixError(f"cannot write the model to {target}: {error.strerror or error}") from error
    return target


def _write(path: Path, content: bytes) -> None:
    # Renamed into place: a server that starts meanwhile never reads half a file.
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix make-model``."""
    parser.description = "Write a small random-weight model with tokenizer and chat template, offline, deterministic."
    parser.add_argument("directory", metavar="DIR", help="where to write it (new, empty, or an earlier such model)")
    parser.add_argument("--arch", choices=_BUILDERS, default="qwen3", help="attention kind (default: qwen3)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another model (default: 0)")
    sizes = parser.add_argument_group("sizes (the defaults suit tests on a small CPU)")
    default = ModelShape()
    for name, what in _SIZES.items():
        value = getattr(default, name)
        sizes.add_argument(_option(name), type=int, metavar="N", help=f"{what} (default: {value})")


def run(args: argparse.Namespace) -> int:
    """Write the model and print what it is. Returns the exit code."""
    given = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    shape = ModelShape(args.arch, **given)
    path = make_model(args.directory, shape, args.seed)
    size = (path / "model.safetensors").stat().st_size / 2**20
    print(
        f"{path}: {shape.arch}, {shape.layers} layers, {shape.vocab} tokens, {size:.0f} MiB of weights, "
        f"{shape.kv_bytes_per_token / 1024:g} KiB of KV per token in float32, seed {args.seed}"
    )
    return 0
