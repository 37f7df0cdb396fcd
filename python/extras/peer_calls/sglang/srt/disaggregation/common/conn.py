"""Routes of the bootstrap server for messages of other workers.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVBootstrapServer"]


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Passes messages about rooms to their listeners."""

    def _setup_routes(self) -> None:
        """Adds the routes."""
        super()._setup_routes()
        for route in peer_calls.FIELDS:
            self.app.router.add_post(route, peer_calls.take)
