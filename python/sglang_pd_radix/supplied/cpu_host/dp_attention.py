"""DP attention: batches padded to those of other ranks, and the copies between a rank's tokens and everybody's.

The exchange itself needs nothing: gloo has all the collectives that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Length of a request that is only there to fill a batch up: the shortest that attention can be asked for.
PADDED_SEQ_LEN = 1


class UnpinnedTorch(ModuleType):
    """``torch``, whose new tensors are never in pinned memory: without an accelerator there is none."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        import torch

        return torch.tensor(*args, **kwargs)


def copy_rows(
    dst: torch.Tensor, src: torch.Tensor, dim: int, offset: torch.Tensor, sz: torch.Tensor, offset_src: bool
) -> None:
    """Copy ``sz`` rows of ``src`` to ``dst``; they begin at ``offset`` in ``src`` if ``offset_src``, else in ``dst``.

    The form of the engine's ``memcpy_triton``: offset and sz are tensors of one number, dim is 0.
    """
    start, length = int(offset), int(sz)
    if offset_src:
        dst[:length] = src[start : start + length]
    else:
        dst[start : start + length] = src[:length]


def _patch_dp_attention(module: Any) -> None:
    module.memcpy_triton = copy_rows


def _patch_forward_batch(module: Any) -> None:
    module.torch = UnpinnedTorch()


def _patch_torch_native(module: Any) -> None:
    module.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: PADDED_SEQ_LEN


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _patch_torch_native,
    "sglang.srt.layers.dp_attention": _patch_dp_attention,
    "sglang.srt.model_executor.forward_batch_info": _patch_forward_batch,
}
