"""Float32 on a GPU: the engine's layers in torch's operations, and float32 products that are as exact as float32 is.

The engine's CUDA kernels for norms, rotary embeddings and activations take 16-bit types only, so on a GPU the question
whether two deployments say the same is one of rounding. In float32 wrong KV shows, and nothing else does but for an
answer in a thousand. All the engine's layers that have a form in torch take it. Attention, copies of KV, CUDA graphs,
streams and the transfer stay what they are. For checks; it is slower.
"""

from __future__ import annotations

import os
from types import ModuleType

from sglang_pd_radix.environment import switched_on

SWITCH = "SGLANG_TORCH_LAYERS"


def wanted() -> bool:
    """Whether the environment asks for it. Raises ValueError for a value that is neither 0 nor 1."""
    return switched_on(SWITCH, "to have layers run in torch", "for the engine's own")


def install() -> None:
    """With ``SGLANG_TORCH_LAYERS=1``, have layers that the engine makes from now on run in torch."""
    if not wanted():
        return
    import wrapt

    # Triton rounds the operands of a float32 product to TF32 unless told otherwise. Read when a kernel is compiled.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    wrapt.register_post_import_hook(_prefer_torch, "sglang.srt.layers.utils.multi_platform")


def _prefer_torch(module: ModuleType) -> None:
    module.MultiPlatformOp.dispatch_forward = lambda layer: layer.forward_native  # type: ignore[attr-defined]
