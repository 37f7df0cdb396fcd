"""Checks the variables of a drain before the model is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments with checks of the drain's variables."""

    def check_server_args(self) -> None:
        """Adds the checks."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.managers import drain, gateway_notice

            drain.drain_seconds(self)
            gateway_notice.gateways()
