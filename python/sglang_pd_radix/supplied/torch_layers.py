"""Float32 on a GPU: the engine's layers in torch's operations, and float32 products that are as exact as float32 is.

The engine's CUDA kernels for norms, rotary embeddings and activations take 16-bit types only, so on a GPU the question
whether two deployments say the same is one of rounding. In float32 it is not: wrong KV shows, and nothing else does.
Attention, copies of KV, CUDA graphs, streams and the transfer stay what they are. For checks; it is slower.
"""

from __future__ import annotations

import os
from types import ModuleType

SWITCH = "SGLANG_TORCH_LAYERS"


def install() -> None:
    """With ``SGLANG_TORCH_LAYERS=1``, have layers that the engine makes from now on run in torch."""
    if os.environ.get(SWITCH, "").strip() != "1":
        return
    import wrapt

    # Triton rounds the operands of a float32 product to TF32 unless told otherwise. Read when a kernel is compiled.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    wrapt.register_post_import_hook(_prefer_torch, "sglang.srt.layers.utils.multi_platform")


def _prefer_torch(module: ModuleType) -> None:
    module.MultiPlatformOp.dispatch_forward = lambda layer: layer.forward_native  # type: ignore[attr-defined]
