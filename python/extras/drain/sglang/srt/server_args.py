"""Looks at the variables of a drain before anything is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments, and what SIGTERM is to do."""

    def check_server_args(self) -> None:
        """Checks what SIGTERM is to do."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.managers import drain, gateway_notice

            drain.drain_seconds(self)
            gateway_notice.gateways()
