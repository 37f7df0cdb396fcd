"""``pd-radix make-model``: a small random-weight model that is sensitive to wrong KV.

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
import json
import os
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .models import dense, dsa, eagle, eagle3, hybrid, mamba2, qwen3_5
from .models.shape import SIZES, ModelShape, option_of
from .models.tokenizer import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    VISION_TOKENS,
    Vocabulary,
    make_vocabulary,
    tokenizer_files,
)
from .models.weights import Tensor

__all__ = ["DRAFT", "ModelShape", "add_arguments", "check_shape", "make_model", "make_vocabulary", "run"]

Builder = Callable[[ModelShape, int, Vocabulary], tuple[dict[str, Any], dict[str, Tensor]]]

BUILDERS: dict[str, Builder] = {
    "qwen3": dense.qwen3,
    "mla": dense.mla,
    "dsa": dsa.dsa,
    "eagle": eagle.target,
    "eagle3": eagle3.target,
    "qwen3-next": hybrid.qwen3_next,
    "qwen3-next-mtp": hybrid.qwen3_next_mtp,
    "qwen3.5": qwen3_5.qwen3_5,
    "qwen3.5-mtp": qwen3_5.qwen3_5_mtp,
    "qwen3.5-moe": qwen3_5.qwen3_5_moe,
    "qwen3.5-moe-mtp": qwen3_5.qwen3_5_moe_mtp,
    "falcon-h1": mamba2.falcon_h1,
    "nemotron-h": mamba2.nemotron_h,
    "kimi-linear": hybrid.kimi_linear,
    "step3p5": hybrid.step3p5,
}
_DRAFTS = {"eagle": eagle.draft, "eagle3": eagle3.draft}
# Models that take images, and their processor files.
_SEEING = dict.fromkeys((arch for arch in BUILDERS if arch.startswith("qwen3.5")), qwen3_5.processor_files)
# Subdirectory of a draft model.
DRAFT = "draft"
# Files that all kinds of models have.
_ALL_HAVE = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
# Suffix of incomplete files.
_PARTIAL = ".partial"


def check_shape(shape: ModelShape) -> None:
    """Raise PdRadixError naming the first size that cannot work."""
    if shape.arch not in BUILDERS:
        raise PdRadixError(f"--arch {shape.arch}: not one of {', '.join(BUILDERS)}")
    for name in SIZES:
        if getattr(shape, name) < 1:
            raise PdRadixError(f"{option_of(name)} {getattr(shape, name)}: must be at least 1")
    if not shape.latent and shape.heads % shape.kv_heads:
        raise PdRadixError(f"--heads {shape.heads} must be a multiple of --kv-heads {shape.kv_heads}")
    if shape.head_dim % 2:
        raise PdRadixError(f"--head-dim {shape.head_dim} must be even: the rotary embedding turns pairs")


def make_model(directory: str | os.PathLike[str], shape: ModelShape | None = None, seed: int = 0) -> Path:
    """Write the model into ``directory`` (made if missing) and return its path.

    An earlier model there is replaced: a directory with all common files, complete or partial. Other non-empty
    directories are refused, so that user files are not mixed with it. Raises PdRadixError.
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
    ids = {"bos_token_id": None, "eos_token_id": special[TURN_END], "pad_token_id": special[END_OF_TEXT]}
    try:
        config, tensors = BUILDERS[shape.arch](shape, seed, vocabulary)
        documents = {
            "config.json": {**config, **ids, "dtype": "float32", "torch_dtype": "float32"},
            "generation_config.json": {**ids, "do_sample": False},
            **tokenizer_files(vocabulary, shape.max_positions),
            **(_SEEING[shape.arch]() if seeing else {}),
        }
        target.mkdir(parents=True, exist_ok=True)
        _take_over(target, {*documents, "model.safetensors", *([DRAFT] if shape.arch in _DRAFTS else [])})
        for name, document in documents.items():
            _write(target / name, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        _write(target / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        if shape.arch in _DRAFTS:
            draft_config, draft = _DRAFTS[shape.arch](shape, seed, documents["config.json"], tensors)
            (target / DRAFT).mkdir(exist_ok=True)
            _write(target / DRAFT / "config.json", (json.dumps(draft_config, indent=1) + "\n").encode())
            _write(target / DRAFT / "model.safetensors", save(draft, metadata={"format": "pt"}))
    except MemoryError as error:
        raise PdRadixError("a model of these sizes does not fit into memory: give smaller ones") from error
    except OSError as error:
        raise PdRadixError(f"cannot write the model to {target}: {error.strerror or error}") from error
    return target


def _take_over(directory: Path, written: Set[str]) -> None:
    """Remove an earlier model's files that are not in ``written``. Raises PdRadixError for other files."""
    draft = directory / DRAFT
    found = [*directory.iterdir(), *(draft.iterdir() if draft.is_dir() else ())]
    ours = {*_ALL_HAVE, *qwen3_5.processor_files(), DRAFT}
    foreign = sorted(str(p.relative_to(directory)) for p in found if p.name.removesuffix(_PARTIAL) not in ours)
    # Other programs use some of these names. After a killed write the last file is partial.
    if not {p.name.removesuffix(_PARTIAL) for p in found if p.parent == directory} >= _ALL_HAVE:
        foreign += sorted(str(p.relative_to(directory)) for p in found if not p.is_dir())
    if foreign:
        raise PdRadixError(f"{directory} holds other files ({foreign[0]}): give a new or empty directory")
    for path in found:
        if path.name not in written:
            shutil.rmtree(path) if path == draft and draft.is_dir() else path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    # Renamed into place: a server that starts meanwhile never reads a partial file.
    partial = path.with_name(path.name + _PARTIAL)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix make-model``."""
    parser.description = "Write a small random-weight model with tokenizer and chat template, offline, deterministic."
    parser.add_argument("directory", metavar="DIR", help="where to write it (new, empty, or an earlier such model)")
    parser.add_argument(
        "--arch", "--attention", choices=BUILDERS, default="qwen3", help="attention kind (default: qwen3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another model (default: 0)")
    sizes = parser.add_argument_group("sizes (the defaults suit tests on a small CPU)")
    default = ModelShape()
    for name, what in SIZES.items():
        value = getattr(default, name)
        sizes.add_argument(option_of(name), type=int, metavar="N", help=f"{what} (default: {value})")


def run(args: argparse.Namespace) -> int:
    """Write the model and print what it is. Returns the exit code."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    shape = ModelShape(args.arch, **given)
    path = make_model(args.directory, shape, args.seed)
    size = (path / "model.safetensors").stat().st_size / 2**20
    print(
        f"{path}: {shape.arch}, {shape.layers} layers, {shape.vocab} tokens, {size:.0f} MiB of weights, "
        f"{shape.kv_bytes_per_token / 1024:g} KiB of KV per token in float32, seed {args.seed}"
    )
    return 0
