"""Checks of options with shared decode attention.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.layers.attention.shared_prefix import option

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments with checks for shared decode attention."""

    def check_server_args(self) -> None:
        """Adds the check, after all defaults are set."""
        super().check_server_args()
        option.check(self)
