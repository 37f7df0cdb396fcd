"""A hierarchical cache whose copies between its levels are torch's, in host memory that nobody registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

# Bytes: the engine's figure.
LEFT_TO_OTHERS = 10 * 1024**3


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_hicache")
    def direct(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu" and instance.enable_hierarchical_cache:
            # The one of the engine's two ways to copy that is a function of tensors.
            instance.hicache_io_backend = "direct"
        wrapped()


def _all_but_what_is_left() -> SimpleNamespace:
    """What the engine takes for free: after it has left its part to others, that is what is free."""
    import psutil

    return SimpleNamespace(available=psutil.virtual_memory().available + LEFT_TO_OTHERS)


def _patch_host_pool(module: Any) -> None:
    import torch

    def allocate(dims: Any, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any) -> torch.Tensor:
        return allocator.allocate(dims, dtype=dtype, device=device)

    def copy(
        src_layers: Sequence[torch.Tensor],
        dst_layers: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        # Of each layer, (slots, heads, dim); indices are of slots.
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    # The engine leaves 10 GB to others: a host of GPUs has plenty, and one without may not have as much in all.
    module.psutil = SimpleNamespace(virtual_memory=_all_but_what_is_left)
    # By the device of the pool whose KV is kept.
    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    module.transfer_kv_direct = copy


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.memory_pool_host": _patch_host_pool,
    "sglang.srt.server_args": _patch_server_args,
}
