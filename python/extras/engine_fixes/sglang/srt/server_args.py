"""Workers of a pair keep idle HTTP connections for as long as their router may.

Upstream: sgl-project/sglang#20851 tells of it.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.environ import envs

__all__ = ["ServerArgs"]

# Seconds for which a worker of a pair keeps an idle HTTP connection. Whoever gives one up first should be the router: a
# request that it sends while the worker closes the connection is lost. Routers keep them for 3 s (smg), 50 s
# (sglang-router), 90 s (Go, hyper) or an hour (Envoy).
KEEP_ALIVE_S = 4000


class ServerArgs(engine.ServerArgs):
    """Server arguments, and what they make of the environment."""

    def _handle_environment_variables(self) -> None:
        """A worker of a pair outlasts its router's idle connections, where the variable is not set.

        Upstream: sgl-project/sglang#20851; the engine's default is 5 s.
        """
        super()._handle_environment_variables()
        if self.disaggregation_mode != "null" and not envs.SGLANG_TIMEOUT_KEEP_ALIVE.is_set():
            envs.SGLANG_TIMEOUT_KEEP_ALIVE.set(KEEP_ALIVE_S)
