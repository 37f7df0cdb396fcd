"""Options of a decode worker for models with Mamba state.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from typing import Any

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import hybrid_support

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments for a prefix cache without states."""

    def _handle_mamba_radix_cache(self, model_arch: str, *args: Any, **kwargs: Any) -> None:
        """Wraps the engine's, which turns off overlap or the cache since its cache would hold states.

        Only with the flag, and without a strategy or speculation that needs the engine's handling.
        """
        decodes = self.disaggregation_mode == "decode" and self.disaggregation_decode_enable_radix_cache
        needed = self.enable_mamba_extra_buffer() or self.speculative_algorithm is not None
        if not decodes or needed or model_arch not in hybrid_support.STATES:
            super()._handle_mamba_radix_cache(model_arch, *args, **kwargs)
            return
        disabled, self.disable_radix_cache = self.disable_radix_cache, True
        super()._handle_mamba_radix_cache(model_arch, *args, **kwargs)
        self.disable_radix_cache = disabled

    def _handle_pd_disaggregation(self) -> None:
        """With the flag, resets the strategy that keeps states for a prefix cache, after its checks have run."""
        super()._handle_pd_disaggregation()
        if self.disaggregation_decode_enable_radix_cache and self.enable_mamba_extra_buffer():
            self.mamba_scheduler_strategy = "no_buffer"
