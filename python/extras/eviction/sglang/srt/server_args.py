"""Checks the watermark before the model is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.free_watermark import watermark_part

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Checks the watermark."""

    def _check_decode_radix_cache(self) -> None:
        watermark_part()
        super()._check_decode_radix_cache()
