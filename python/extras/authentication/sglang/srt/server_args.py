"""Looks at the secret before anything is loaded, and has calls signed in each process.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.disaggregation.decode_radix import hooks

__all__ = ["ServerArgs"]


def _call_hooks() -> hooks.CallHooks:
    # Not at the top: it needs the engine's modules, which need this one.
    from sglang.srt.disaggregation.common.authentication import CallHooks

    return CallHooks()


hooks.register(hooks.CallHooks, _call_hooks)


class ServerArgs(engine.ServerArgs):
    """Server arguments, and the secret of the control plane."""

    def check_server_args(self) -> None:
        """Checks the file of the secret."""
        super().check_server_args()
        if self.disaggregation_mode != "null":
            from sglang.srt.disaggregation.common.authentication import secret

            secret()
