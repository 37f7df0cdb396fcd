"""KV pools without CUDA streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _patch_memory_pool(module: Any) -> None:
    # Copies of retracted requests' KV wait for CUDA streams that do not exist here.
    module.torch.cuda.synchronize = lambda device=None: None


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.memory_pool": _patch_memory_pool,
}
