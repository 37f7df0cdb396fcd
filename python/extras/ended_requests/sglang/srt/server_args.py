"""Looks at the number of requests to remember before anything is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments, and how many ended requests are remembered."""

    def check_server_args(self) -> None:
        """Checks that it is a number."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.observability import request_life

            request_life.remembered()
