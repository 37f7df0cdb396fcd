"""Speculation refused with decode's tree, added to `cache_support.py` on import.

Upstream: none: it names what has been verified here. EAGLE was in sgl-project/sglang#39150 (closed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.cache_support import DECODE, FLAG, Refused, Rule, kinds_with, replace

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

__all__ = ["check_draft"]

# Speculative algorithms verified with the tree.
ALGORITHMS = ("EAGLE", "EAGLE3")
# Models whose own draft (MTP) is verified.
OWN_DRAFTS = ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def _speculation(name: str, used: Callable[[ServerArgs], object]) -> Rule:
    return Rule(name, lambda args: args.speculative_algorithm is not None and used(args))


def _has_draft_apart(args: ServerArgs) -> bool:
    path = args.speculative_draft_model_path
    return args.speculative_algorithm is not None and path not in (None, args.model_path)


def _has_unknown_own_draft(args: ServerArgs) -> bool:
    """Whether the draft is part of a model that is not verified."""
    if args.enable_multi_layer_eagle:
        return True
    if _has_draft_apart(args):
        return False
    known = args.speculative_algorithm == "EAGLE"
    return not (known and args.get_model_config().hf_config.architectures[0] in OWN_DRAFTS)


replace(
    DECODE,
    "--speculative-algorithm",
    _speculation(
        f"--speculative-algorithm {{args.speculative_algorithm}} ({', '.join(ALGORITHMS)} is)",
        lambda args: args.speculative_algorithm not in ALGORITHMS,
    ),
    _speculation("--speculative-eagle-topk above 1", lambda args: (args.speculative_eagle_topk or 1) > 1),
    _speculation(
        f"a draft that is part of the model (MTP), other than that of {', '.join(OWN_DRAFTS)}",
        _has_unknown_own_draft,
    ),
    _speculation(
        "--speculative-algorithm {args.speculative_algorithm} and --data-parallel-size above 1",
        lambda args: args.dp_size > 1,
    ),
    _speculation(
        "--speculative-algorithm {args.speculative_algorithm} and --enable-custom-logit-processor",
        lambda args: args.enable_custom_logit_processor,
    ),
)
for kind in kinds_with("linear attention"):
    kind.refused = (
        Refused(
            f"{FLAG} is not verified for speculative decoding with linear attention and a draft model of its own "
            "({args.speculative_draft_model_path}). Leave --speculative-draft-model-path out if the model has a "
            "draft in itself (MTP), or --speculative-algorithm, or start this decode worker without the flag.",
            (Rule("--speculative-draft-model-path of another model", _has_draft_apart),),
        ),
        *kind.refused,
    )


def check_draft(args: ServerArgs, target: ModelConfig, draft: ModelConfig) -> None:
    """Raise ValueError for a draft that is not verified, judged by its configuration, not its path.

    Refused are a draft that is part of a model (MTP) given by its own path, and one with another hidden size than the
    target. EAGLE3 allows the latter. But after a step that ends all requests the engine keeps hidden states of the
    target's size, and the worker ends when it concatenates the next request's, of the draft's size.
    """
    way_out = "Take another draft, or start this decode worker without the flag."
    architecture = draft.hf_config.architectures[0]
    if _has_draft_apart(args) and architecture.endswith(("MTP", "NextN")):
        raise ValueError(
            f"{FLAG} is not verified for a draft that is part of a model (MTP) and has a path of its own, "
            f"{architecture}. {way_out}"
        )
    sizes = [config.hidden_size for config in (target, draft)]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{FLAG} is not verified for a draft model with another hidden size ({sizes[1]}) than the model's "
            f"({sizes[0]}). {way_out}"
        )
