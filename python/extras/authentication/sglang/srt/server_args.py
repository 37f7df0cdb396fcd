"""Checks the secret before the model is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Checks the control plane's secret."""

    def check_server_args(self) -> None:
        """Checks the secret's file."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            # Not at the top: a circular import.
            from sglang.srt.disaggregation.common.authentication import secret

            secret()
