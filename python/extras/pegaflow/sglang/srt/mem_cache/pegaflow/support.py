"""Combinations with ``--enable-pegaflow`` that are refused, as rules added to `cache_support.py` on import.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import DIFFUSION, FLAG, CacheKind, Refused, Rule, several, switch

__all__ = ["PEGAFLOW", "PEGAFLOW_FLAG"]

PEGAFLOW_FLAG = "--enable-pegaflow"

PEGAFLOW = CacheKind(
    f"any with {PEGAFLOW_FLAG}, full attention in all layers",
    "PegaFlowRadixCache, on decode PegaFlowDecodeRadixCache",
    (
        Refused(
            f"{PEGAFLOW_FLAG} is not verified together with {{name}}. Leave one of the two out.",
            (
                Rule(
                    f"--disaggregation-mode decode without {FLAG}",
                    lambda args: (
                        args.disaggregation_mode == "decode" and not args.disaggregation_decode_enable_radix_cache
                    ),
                ),
                switch("--disable-radix-cache"),
                switch("--enable-hierarchical-cache"),
                Rule("--hicache-storage-backend", lambda args: args.hicache_storage_backend is not None),
                switch("--enable-lmcache"),
                switch("--enable-hisparse"),
                switch("--disaggregation-decode-enable-offload-kvcache"),
                switch("--enable-streaming-session"),
                Rule("--enable-lora", lambda args: args.enable_lora or args.lora_paths),
                Rule("--speculative-algorithm", lambda args: args.speculative_algorithm is not None),
                DIFFUSION,
                switch("--enable-dp-attention"),
                several("--data-parallel-size", "dp_size"),
                several("--pipeline-parallel-size", "pp_size"),
                several("--attention-context-parallel-size", "attn_cp_size"),
                several("--nnodes", "nnodes"),
                switch("--enable-memory-saver"),
                switch("--is-embedding"),
                Rule("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", lambda args: envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()),
            ),
        ),
        Refused(
            f"{PEGAFLOW_FLAG} is not verified for {{name}}. Leave the flag out.",
            (
                Rule("multimodal models", lambda args: args.get_model_config().is_multimodal),
                Rule("sliding-window models", lambda args: args.get_model_config().is_hybrid_swa),
            ),
        ),
    ),
)

cache_support.KINDS.append(PEGAFLOW)
