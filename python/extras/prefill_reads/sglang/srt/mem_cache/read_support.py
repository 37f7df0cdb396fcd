"""Options refused together with reads from decode, added to `cache_support.py` on import.

Upstream: none: it names what has been verified here.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.mem_cache.cache_support import DIFFUSION, KINDS, CacheKind, Refused, Rule, several, switch

__all__ = ["READS", "READ_FLAG"]

READ_FLAG = "--disaggregation-prefill-read-decode"

READS = CacheKind(
    f"prefill with {READ_FLAG}, full attention in all layers",
    "the engine's RadixCache",
    (
        Refused(
            f"{READ_FLAG} is for prefill workers, but {{name}}. Leave it out here.",
            (
                Rule(
                    "--disaggregation-mode is {args.disaggregation_mode}",
                    lambda args: args.disaggregation_mode != "prefill",
                ),
            ),
        ),
        Refused(
            f"{READ_FLAG} needs a transfer backend with a read of another's memory, which is nixl, and "
            "--disaggregation-transfer-backend is {args.disaggregation_transfer_backend}. Use nixl on prefill and "
            "decode, or leave the option out.",
            (
                Rule(
                    "--disaggregation-transfer-backend other than nixl",
                    lambda args: args.disaggregation_transfer_backend != "nixl",
                ),
            ),
        ),
        Refused(
            f"{READ_FLAG} is not verified together with {{name}}. Leave one of the two out.",
            (
                switch("--disable-radix-cache"),
                switch("--enable-hierarchical-cache"),
                # An option of an extra that may be absent.
                Rule("--enable-pegaflow", lambda args: getattr(args, "enable_pegaflow", False)),
                switch("--enable-lmcache"),
                switch("--enable-streaming-session"),
                DIFFUSION,
                switch("--enable-dp-attention"),
                Rule("--enable-lora", lambda args: args.enable_lora or args.lora_paths),
                Rule("--speculative-algorithm", lambda args: args.speculative_algorithm is not None),
                several("--pipeline-parallel-size", "pp_size"),
                several("--attention-context-parallel-size", "attn_cp_size"),
                Rule("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", lambda args: envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()),
            ),
        ),
    ),
)

KINDS.append(READS)
