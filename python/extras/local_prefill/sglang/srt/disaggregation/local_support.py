"""Options that local prefill is refused with, and the default where it cannot work.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.mem_cache.cache_support import FLAG, KINDS, CacheKind, Refused, Rule

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["LOCAL", "OPTION", "may_compute_prompts"]

OPTION = "--disaggregation-decode-local-prefill"


def _computes(name: str, used: Callable[[ServerArgs], object]) -> Rule:
    """A rule that refuses local prefill with ``name``."""
    both = f"{OPTION} with {name}"
    return Rule(both, lambda args: args.disaggregation_decode_local_prefill not in (None, "off") and used(args))


def _has_bounded_dispatch(args: ServerArgs) -> bool:
    """Whether an MoE layer fails on a step of more than some hundred tokens.

    DeepEP's low-latency mode takes 128 tokens a rank by default. Other backends have only such a mode, and the engine
    runs no prefill step on a decode worker.
    """
    few = args.moe_a2a_backend == "deepep" and args.deepep_mode == "low_latency"
    return few or args.moe_a2a_backend not in ("none", "deepep")


def _skips_all_gather(args: ServerArgs) -> bool:
    return envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get()


def may_compute_prompts(args: ServerArgs) -> bool:
    """Whether local prefill is on by default."""
    return not (_has_bounded_dispatch(args) or _skips_all_gather(args))


LOCAL = CacheKind(
    f"decode with {OPTION}",
    "as without",
    (
        Refused(
            f"{FLAG} is not verified together with {{name}}. Leave one of the two out.",
            (
                _computes(
                    "--moe-a2a-backend {args.moe_a2a_backend} --deepep-mode {args.deepep_mode} (deepep with normal or "
                    "auto is)",
                    _has_bounded_dispatch,
                ),
                # Decoding ranks would use DeepEP's low-latency mode, and a rank with a prompt the normal one.
                _computes("SGLANG_SCHEDULER_SKIP_ALL_GATHER", _skips_all_gather),
            ),
        ),
    ),
)
KINDS.append(LOCAL)
