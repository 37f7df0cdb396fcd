"""Pipeline parallelism: its loops order their stages by streams and events of CUDA.

What they exchange needs nothing: between tensors of a CPU it goes over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dp_attention import UnpinnedTorch


class TorchWithoutCuda(UnpinnedTorch):
    """``torch``, whose ``cuda`` is ``torch.cpu``: streams and events of the same names, which order nothing."""

    @property
    def cuda(self) -> Any:
        import torch

        return torch.cpu


def _patch_pipeline(module: Any) -> None:
    module.torch = TorchWithoutCuda()


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.managers.scheduler_pp_mixin": _patch_pipeline,
}
