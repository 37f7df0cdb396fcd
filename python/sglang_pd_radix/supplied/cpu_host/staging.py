"""Mooncake's staging buffers in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def gather_heads(
    k_buffers: list[torch.Tensor],
    v_buffers: list[torch.Tensor],
    page_indices: Any,
    staging_buffer: Any,
    head_start: int,
    num_heads: int,
    page_size: int,
    gpu_id: int,
) -> int:
    """Copy some heads of some pages of each layer, K before V, into a staging buffer; returns the bytes written.

    The engine's function of this calling form puts the copies on a CUDA stream. page_indices: int32 array.
    """
    import numpy as np
    import torch

    pages = torch.from_numpy(page_indices.astype(np.int64))
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    end = 0
    for pool in (*k_buffers, *v_buffers):
        block = pool[slots, head_start : head_start + num_heads].contiguous().view(torch.uint8).flatten()
        staging_buffer.buffer[end : end + len(block)] = block
        end += len(block)
    return end


def _patch_staging_buffer(module: Any) -> None:
    import torch

    class HostStagingBuffer(module.StagingBuffer):  # type: ignore[misc, name-defined]
        """A staging buffer in host memory, whatever device it is asked for."""

        def __init__(self, size_bytes: int, device: str, gpu_id: int, custom_mem_pool: Any = None) -> None:
            self.size_bytes, self.device, self.gpu_id = size_bytes, "cpu", gpu_id
            self.buffer = torch.empty(size_bytes, dtype=torch.uint8)
            self.data_ptr = self.buffer.data_ptr()

    module.StagingBuffer = HostStagingBuffer
    module.gather_all_layers_to_staging = gather_heads
    module._USE_TRITON_STAGING = False


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.disaggregation.common.staging_buffer": _patch_staging_buffer,
}
