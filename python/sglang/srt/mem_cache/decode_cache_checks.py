"""Which models, drafts and options a decode worker with a radix cache takes.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

__all__ = ["FLAG", "check_draft", "check_draft_of_hybrid", "check_windows"]

FLAG = "--disaggregation-decode-enable-radix-cache"


def _has_draft_apart(args: ServerArgs) -> bool:
    path = args.speculative_draft_model_path
    return args.speculative_algorithm is not None and path not in (None, args.model_path)


def check_draft(args: ServerArgs, target: ModelConfig, draft: ModelConfig) -> None:
    """Raise ValueError for a draft that is not verified with the flag, by what it is and not where it lies.

    That is a part of a model (MTP) whose path is another, which the options do not tell from a draft by itself; and
    one narrower or wider than its target. EAGLE3 allows the latter. But where all requests end in one step, the engine
    leaves hidden states of the target's size, and ends the worker when those of the next request, of the draft's, are
    put beside them.
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


def check_draft_of_hybrid(args: ServerArgs) -> None:
    """Raise ValueError for a draft model that is not verified for a model with linear attention."""
    if _has_draft_apart(args):
        raise ValueError(
            f"{FLAG} is not verified for speculative decoding with linear attention and a draft model of its own "
            f"({args.speculative_draft_model_path}). Leave --speculative-draft-model-path out if the model has a "
            "draft in itself (MTP), or --speculative-algorithm, or start this decode worker without the flag."
        )


def check_windows(args: ServerArgs) -> None:
    """Raise ValueError for the first option that is not verified for a model with pools for sliding windows."""
    unverified = {
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--enable-dp-attention": args.enable_dp_attention,
        "--disaggregation-decode-verify-pages, whose digests leave windows out": (
            args.disaggregation_decode_verify_pages
        ),
    }
    for name, used in unverified.items():
        if used:
            raise ValueError(
                f"{FLAG} is not verified for a model with sliding windows together with {name}. Leave that out, "
                "start with --disable-hybrid-swa-memory, which keeps the KV of all layers for all tokens, or start "
                "this decode worker without the flag."
            )
