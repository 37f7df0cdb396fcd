"""Which options go together with ``--enable-pegaflow``.

Upstream: not in the engine (PR #17221 was closed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.mem_cache import pegaflow_memory
from sglang.srt.mem_cache.pegaflow_session import check_server, is_loopback, server_url

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["check"]

FLAG = "--enable-pegaflow"


def check(args: ServerArgs) -> None:
    """Raise ValueError for what is wrong or not verified, or if no server of the right version is there.

    Before the model is loaded, and with all defaults settled.
    """
    unverified = {
        "--disaggregation-mode decode without --disaggregation-decode-enable-radix-cache": (
            args.disaggregation_mode == "decode" and not args.disaggregation_decode_enable_radix_cache
        ),
        "--disable-radix-cache": args.disable_radix_cache,
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--hicache-storage-backend": args.hicache_storage_backend is not None,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-hisparse": args.enable_hisparse,
        "--disaggregation-decode-enable-offload-kvcache": args.disaggregation_decode_enable_offload_kvcache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--enable-lora": bool(args.enable_lora or args.lora_paths),
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--dllm-algorithm": args.dllm_algorithm is not None,
        "--enable-dp-attention": args.enable_dp_attention,
        "--data-parallel-size above 1": args.dp_size > 1,
        "--pipeline-parallel-size above 1": args.pp_size > 1,
        "--attention-context-parallel-size above 1": args.attn_cp_size > 1,
        "--nnodes above 1": args.nnodes > 1,
        "--enable-memory-saver": args.enable_memory_saver,
        "--is-embedding": args.is_embedding,
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get(),
    }
    for name, used in unverified.items():
        if used:
            raise ValueError(f"{FLAG} is not verified together with {name}. Leave one of the two out.")
    model = args.get_model_config()
    kinds = {
        "multimodal": model.is_multimodal,
        "sliding-window": model.is_hybrid_swa,
        "sparse-attention": "index_topk" in model.hf_text_config.to_dict(),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise ValueError(f"{FLAG} is not verified for {kind} models. Leave the flag out.")
    url = server_url(args.pegaflow_endpoint)
    if not is_loopback(url) and not args.pegaflow_allow_non_loopback:
        raise ValueError(
            f"--pegaflow-endpoint is {args.pegaflow_endpoint!r}, which other machines may reach: whoever reaches a "
            "PegaFlow server can have it run any code. Bind it to 127.0.0.1, or give --pegaflow-allow-non-loopback "
            "if that network is closed."
        )
    pegaflow_memory.check_device(args.device)
    check_server(url)
