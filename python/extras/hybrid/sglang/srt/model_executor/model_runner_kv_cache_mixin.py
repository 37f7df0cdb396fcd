"""The number of state slots of a decode worker whose prefix cache holds no states.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.model_executor import model_runner_kv_cache_mixin as engine

__all__ = ["ModelRunnerKVCacheMixin"]


class ModelRunnerKVCacheMixin(engine.ModelRunnerKVCacheMixin):
    """Sizes decode's state pool as without the flag: one slot per request."""

    def _calculate_mamba_ratio(self) -> int:
        """Wraps the engine's, which counts two or more slots per request if there is a prefix cache."""
        with self._without_checkpoints():
            return super()._calculate_mamba_ratio()

    def handle_max_mamba_cache(self, total_rest_memory: float) -> float:
        """Wraps the engine's, which gives half of the memory to states if there is a prefix cache."""
        with self._without_checkpoints():
            return super().handle_max_mamba_cache(total_rest_memory)

    @contextmanager
    def _without_checkpoints(self) -> Iterator[None]:
        """Hide the decode radix cache from the engine's sizing, since it holds no states."""
        args = self.server_args
        disabled = args.disable_radix_cache
        args.disable_radix_cache = disabled or args.disaggregation_decode_enable_radix_cache
        try:
            yield
        finally:
            args.disable_radix_cache = disabled
