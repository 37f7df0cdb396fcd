"""Looks at the secret before anything is loaded.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments, and the secret of the control plane."""

    def check_server_args(self) -> None:
        """Checks the file of the secret."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            # Not at the top: it needs the engine's modules, which need this one.
            from sglang.srt.disaggregation.common.authentication import secret

            secret()
