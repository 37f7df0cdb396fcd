"""Options of a decode worker whose model has states.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import hybrid_support  # noqa: F401

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments for a prefix cache that holds no states."""

    def _handle_pd_disaggregation(self) -> None:
        """Puts off the strategy whose slots hold states for a prefix cache; all else that it allows has been settled.

        With the flag.
        """
        super()._handle_pd_disaggregation()
        if self.disaggregation_decode_enable_radix_cache and self.enable_mamba_extra_buffer():
            self.mamba_scheduler_strategy = "no_buffer"
