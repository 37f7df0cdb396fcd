"""KV pools without CUDA streams, and of fp8 with what torch can compute with on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _patch_memory_pool(module: Any) -> None:
    # Copies of retracted requests' KV wait for CUDA streams that do not exist here.
    module.torch.cuda.synchronize = lambda device=None: None
    for pool in ("MHATokenToKVPool", "MLATokenToKVPool"):
        for name in ("get_key_buffer", "get_value_buffer"):
            _widen(module, f"{pool}.{name}")


def _widen(module: Any, name: str) -> None:
    import torch
    import wrapt

    @wrapt.patch_function_wrapper(module, name)
    def widened(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Attention reads KV by these; what is stored, sent and offloaded stays fp8. Torch can neither index nor
        # multiply fp8 on a CPU. A layer of the pool is converted whole, which suits tests, not traffic.
        buffer = wrapped(*args, **kwargs)
        fp8 = buffer.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and buffer.device.type == "cpu"
        return buffer.to(torch.get_default_dtype()) if fp8 else buffer


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.memory_pool": _patch_memory_pool,
}
