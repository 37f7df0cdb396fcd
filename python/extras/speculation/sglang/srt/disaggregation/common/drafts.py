"""Checks that the draft models of a pair match.

Prefill sends the draft's KV and its first proposed tokens, as token ids of the draft. A draft with other heads or
layers would overwrite neighbouring memory, and one with a larger vocabulary propose tokens that decode's does not know.
Weights are not compared: other weights only lower the accept length.

Upstream: none is known that compares the drafts of two workers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

logger = logging.getLogger(__name__)

__all__ = ["check_drafts", "describe_draft"]

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)


def describe_draft(server_args: Any) -> str:
    """Architecture and sizes of the draft model, or "the model's own".

    "" without speculation, or if the configuration cannot be read. May download it: not for an event loop.
    """
    path = getattr(server_args, "speculative_draft_model_path", None)
    if getattr(server_args, "speculative_algorithm", None) is None:
        return ""
    if path is None or path == server_args.model_path:
        return "the model's own"
    try:
        return _describe(path, server_args.trust_remote_code, server_args.speculative_draft_model_revision)
    except Exception as e:
        # The engine could load the model; only this check is skipped.
        logger.warning("The configuration of the draft model %s is not compared with the peer's: %r", path, e)
        return ""


@functools.lru_cache
def _describe(path: str, trust_remote_code: bool, revision: str | None) -> str:
    config = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    sizes = get_hf_text_config(config)
    named = [f"{name} {value}" for name in _SIZES if (value := getattr(sizes, name, None)) is not None]
    return ", ".join([config.architectures[0], *named])


def check_drafts(answer: Mapping[str, Any], server_args: Any) -> None:
    """Raise ValueError if prefill and this worker speculate differently; a retry does not help."""
    if not int(answer["version"]):
        return
    drafts, draft_model = str(answer.get("drafts") or ""), str(answer.get("draft_model") or "")
    own = getattr(server_args, "speculative_algorithm", None) or ""
    if drafts != own:
        # Its pages would lack KV of this worker's draft model, also in the tree.
        raise ValueError(
            f"it speculates with {drafts or 'nothing'} and this decode worker with {own or 'nothing'}. "
            "Give both the same --speculative-algorithm and draft model"
        )
    own = describe_draft(server_args)
    if draft_model and own and draft_model != own:
        raise ValueError(
            f"its draft model ({draft_model}) is not this decode worker's ({own}). Give both the same "
            "--speculative-draft-model-path"
        )
