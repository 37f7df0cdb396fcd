"""Workers of a pair keep idle HTTP connections for as long as their router may.

Upstream: sgl-project/sglang#20851 tells of it.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.environ import envs

__all__ = ["ServerArgs"]

# Seconds for which a worker of a pair keeps an idle HTTP connection. The router should close it first: a request sent
# while the worker closes the connection is lost. Routers keep connections for 3 s (smg), 50 s (sglang-router), 90 s
# (Go, hyper) or an hour (Envoy).
KEEP_ALIVE_S = 4000


class ServerArgs(engine.ServerArgs):
    """Server arguments with a default for a variable of the engine."""

    def _handle_environment_variables(self) -> None:
        """Keeps idle HTTP connections longer than routers do, if the variable is not set.

        Upstream: sgl-project/sglang#20851; the engine's default is 5 s.
        """
        super()._handle_environment_variables()
        if self.disaggregation_mode != "null" and not envs.SGLANG_TIMEOUT_KEEP_ALIVE.is_set():
            envs.SGLANG_TIMEOUT_KEEP_ALIVE.set(KEEP_ALIVE_S)
