"""Checks the number of requests to record before the model is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments with a check of the number of recorded requests."""

    def check_server_args(self) -> None:
        """Adds the check."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.observability import request_life

            request_life.remembered()
