"""Shared decode attention on GPUs: the option, and where it is refused or has no effect.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_pd_radix.environment import switched_on

OPTION = "SGLANG_TRITON_SHARED_PREFIX_ATTENTION"
#: Wider heads exceed a program's registers; a tiling for them could only be tuned on a GPU.
WIDEST_HEAD = 256


def wanted() -> bool:
    """Whether the variable is 1. Raises ValueError for a value other than 0 and 1."""
    return switched_on(OPTION, "to read shared prefixes once", "to leave it off")


def check(args: Any) -> None:
    """Raise ValueError for the first incompatible server argument. A prefill worker ignores the option."""
    if not wanted() or args.disaggregation_mode == "prefill":
        return
    _, backend = args.get_attention_backends()
    if backend != "triton":
        raise ValueError(
            f"{OPTION}=1 is for the triton attention backend, but decode steps use {backend!r}. "
            "Add --decode-attention-backend triton, or unset the variable."
        )
    unverified = {
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--enable-deterministic-inference, since sums depend on what is shared": args.enable_deterministic_inference,
        "--enable-double-sparsity": args.enable_double_sparsity,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-pdmux": args.enable_pdmux,
        "--enable-dp-attention": args.enable_dp_attention,
        "--enable-streaming-session": args.enable_streaming_session,
        "--pipeline-parallel-size above 1": args.pp_size > 1,
    }
    for name, used in unverified.items():
        if used:
            raise ValueError(f"{OPTION}=1 is not verified together with {name}. Leave one of the two out.")


def is_windowed(layer: Any) -> bool:
    """Whether a layer has a sliding window, for which the engine keeps separate metadata."""
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def why_not(runner: Any, layers: Sequence[Any]) -> str | None:
    """Why decode attention of this model is not shared; None if it is.

    layers: the model's attention layers. Layers with a sliding window use the engine's kernels. If any other layer
    cannot be shared, none is, since they use one set of metadata.
    """
    import torch
    from sglang.srt.configs.model_config import AttentionArch

    if runner.model_config.attention_arch == AttentionArch.MLA:
        return "MLA already reads a latent once for all heads of a request, and its tiling must be tuned on a GPU"
    full = [layer for layer in layers if not is_windowed(layer)]
    if not full:
        return "every layer has a sliding window"
    if any(layer.xai_temperature_len > 0 for layer in full):
        return "the model scales scores by position (xai temperature)"
    if any(layer.is_cross_attention for layer in full):
        return "the model has cross attention"
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim) for layer in full}
    if len(shapes) > 1:
        return "the head shapes of its layers differ"
    if max(full[0].qk_head_dim, full[0].v_head_dim) > WIDEST_HEAD:
        return f"its heads are wider than {WIDEST_HEAD}"
    pool = runner.token_to_kv_pool
    types = {pool.get_key_buffer(full[0].layer_id).dtype, pool.get_value_buffer(full[0].layer_id).dtype}
    if types != {runner.dtype} or runner.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its KV is stored as {', '.join(sorted(map(str, types)))} and computed in {runner.dtype}"
    return None
