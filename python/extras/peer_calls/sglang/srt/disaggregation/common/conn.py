"""The bootstrap server takes what other workers tell and ask.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVBootstrapServer"]


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Hands on messages about rooms."""

    def _setup_routes(self) -> None:
        """Adds their routes."""
        super()._setup_routes()
        for route in peer_calls.FIELDS:
            self.app.router.add_post(route, peer_calls.take)
