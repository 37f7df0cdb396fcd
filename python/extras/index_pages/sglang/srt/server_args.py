"""Options of decode workers for models with index pages.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.index_support import INDEXED

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Checks options before the model is loaded."""

    def _handle_pd_disaggregation(self) -> None:
        """Adds the options refused with index pages."""
        from sglang.srt.configs.model_config import is_deepseek_nsa

        super()._handle_pd_disaggregation()
        if self.disaggregation_decode_enable_radix_cache and is_deepseek_nsa(self.get_model_config().hf_config):
            cache_support.check(INDEXED, self)
