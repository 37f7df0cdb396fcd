"""Signs messages between workers and requests to bootstrap servers, if there is a secret.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.authentication import (
    SignedRequests,
    SigningSocket,
    VerifyingSocket,
    middleware,
    secret,
)
from sglang.srt.utils.network import NetworkAddress

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "requests"]

requests = SignedRequests(engine.requests)


def _signing(socket, endpoint: str):
    key = secret()
    return socket if key is None else SigningSocket(socket, endpoint, key)


class CommonKVManager(engine.CommonKVManager):
    """Signs and verifies messages."""

    requests = requests

    def __init__(self, *args, **kwargs):
        """Takes only signed messages, with a secret."""
        super().__init__(*args, **kwargs)
        if (key := secret()) is not None:
            own = NetworkAddress(self.local_ip, self.rank_port).to_tcp()
            self.server_socket = VerifyingSocket(self.server_socket, own, key)

    def _connect(self, endpoint: str, is_ipv6: bool = False):
        """Signs messages, with a secret."""
        return _signing(super()._connect(endpoint, is_ipv6), endpoint)

    def connect_unwaiting(self, host: str, port: int):
        """Signs messages, with a secret."""
        socket = super().connect_unwaiting(host, port)
        return socket if secret() is None else _signing(socket, NetworkAddress(host, port).to_tcp())


class CommonKVReceiver(engine.CommonKVReceiver):
    """Signs messages."""

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """Signs messages, with a secret."""
        socket, lock = super()._connect(endpoint, is_ipv6)
        return _signing(socket, endpoint), lock


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Requires signed requests, with a secret."""

    def _setup_routes(self) -> None:
        """Adds the check before all routes."""
        super()._setup_routes()
        if (key := secret()) is not None:
            self.app.middlewares.insert(0, middleware(key))
