"""Hybrid models: saves and restores the state of a retracted request.

Upstream: none is known for a retraction; sgl-project/sglang#32732 (open) and #40263 (merged) keep a tree for such
models.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache import memory_pool as engine

__all__ = ["HybridLinearKVPool", "MambaPool"]


class MambaPool(engine.MambaPool):
    """State slots of linear attention or Mamba layers."""

    def get_cpu_copy(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Copy slot ``slot`` (an int64 scalar) to host memory: one tensor (layers, ...) per kind of state."""
        torch.cuda.synchronize()
        return [states[:, slot].to("cpu", copy=True) for states in self._kinds()]

    def load_cpu_copy(self, saved: list[torch.Tensor], slot: torch.Tensor) -> None:
        """Restore a slot. A step in flight may have used it for another request."""
        torch.cuda.synchronize()
        for states, state in zip(self._kinds(), saved, strict=True):
            states[:, slot] = state.to(states.device)
        torch.cuda.synchronize()

    def _kinds(self) -> list[torch.Tensor]:
        return [*self.mamba_cache.conv, self.mamba_cache.temporal]


class HybridLinearKVPool(engine.HybridLinearKVPool):
    """KV of a model with KV in some layers only; the others have a state in a `MambaPool`."""

    @property
    def cpu_offloading_chunk_size(self) -> int:
        """Tokens per piece of the copies below."""
        return self.full_kv_pool.cpu_offloading_chunk_size

    def get_cpu_copy(self, indices: torch.Tensor) -> list:
        """Replaces the engine's NotImplementedError, which ends a decode worker at a retraction."""
        return self.full_kv_pool.get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu: list, indices: torch.Tensor) -> None:
        """The inverse, which the engine lacks too."""
        self.full_kv_pool.load_cpu_copy(kv_cache_cpu, indices)
