"""Layout of this process's KV pool for a PegaFlow server, and the handles that it maps.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

__all__ = ["KVLayout", "check_device", "device_id", "kv_layout", "wrapper_bytes"]


@dataclass(frozen=True)
class KVLayout:
    """Buffers of a KV pool as the server registers them: one named layer per buffer, with pages as blocks.

    buffers: by layer name, each ``[slots, ...]`` and contiguous, with ``page_size`` slots to a page.
    shared: whether all TP ranks hold the same bytes (MLA latents, index keys), so that one copy serves all.
    """

    buffers: dict[str, torch.Tensor]
    page_size: int
    shared: bool

    @property
    def names(self) -> list[str]:
        return list(self.buffers)

    @property
    def num_pages(self) -> list[int]:
        return [len(buffer) // self.page_size for buffer in self.buffers.values()]

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page in each buffer."""
        return [buffer[0].nbytes * self.page_size for buffer in self.buffers.values()]

    def describe(self) -> list[object]:
        """Values that two pools must share to exchange pages: page size; name, shape and dtype of each layer."""
        return [self.page_size, *((name, tuple(one.shape[1:]), str(one.dtype)) for name, one in self.buffers.items())]


def kv_layout(pool: Any, page_size: int) -> KVLayout:
    """The layout of ``pool``. Raises ValueError for a pool that is not plain MHA, MLA or NSA."""
    if type(pool) is MHATokenToKVPool:
        pairs = enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))
        buffers = {f"{kind}{i}": part for i, pair in pairs for kind, part in zip("kv", pair, strict=True)}
        shared = False
    elif type(pool) in (MLATokenToKVPool, NSATokenToKVPool):
        buffers = {f"latent{i}": part for i, part in enumerate(pool.kv_buffer)}
        # One row per page, the keys of all its tokens before their scales; divided into one row per token.
        index = getattr(pool, "index_k_with_scale_buffer", ())
        buffers |= {f"index{i}": part.view(-1, part.shape[1] // page_size) for i, part in enumerate(index)}
        shared = True
    else:
        raise ValueError(
            f"--enable-pegaflow is not verified for this model: its KV pool is a {type(pool).__name__}. Supported: "
            "plain MHA, MLA and NSA pools (MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool). Leave the flag out."
        )
    for name, buffer in buffers.items():
        if not buffer.is_contiguous() or len(buffer) % page_size:
            raise ValueError(f"--enable-pegaflow: KV buffer {name} of shape {tuple(buffer.shape)} is not whole pages.")
    return KVLayout(buffers, page_size, shared)


def check_device(device: str) -> None:
    """Raise ValueError if the KV pool of a worker on ``device`` cannot be mapped by the server."""
    if device.split(":")[0] != "cuda":
        raise ValueError(
            f"--enable-pegaflow needs --device cuda, since the server maps the KV pool by CUDA IPC; this is {device!r}."
        )


def wrapper_bytes(tensor: torch.Tensor) -> bytes:
    """The pickled CUDA IPC handle of ``tensor``."""
    from pegaflow.ipc_wrapper import CudaIPCWrapper

    return pickle.dumps(CudaIPCWrapper(tensor))


def device_id(device: torch.device) -> int:
    """Physical number of the GPU ``device``, which CUDA_VISIBLE_DEVICES may renumber; 0 for other devices."""
    if device.type != "cuda":
        return 0
    local = device.index if device.index is not None else torch.cuda.current_device()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return int(visible[local]) if local < len(visible) and visible[local].isdigit() else local
