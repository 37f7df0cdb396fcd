"""Messages between workers and questions to bootstrap servers, signed where there is a secret.

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
    """Signs what it sends, and takes what is signed."""

    requests = requests

    def __init__(self, *args, **kwargs):
        """Takes only messages that can be believed, where there is a secret."""
        super().__init__(*args, **kwargs)
        if (key := secret()) is not None:
            own = NetworkAddress(self.local_ip, self.rank_port).to_tcp()
            self.server_socket = VerifyingSocket(self.server_socket, own, key)

    def _connect(self, endpoint: str, is_ipv6: bool = False):
        """Messages are signed where there is a secret."""
        return _signing(super()._connect(endpoint, is_ipv6), endpoint)

    def connect_unwaiting(self, host: str, port: int):
        """Messages are signed where there is a secret."""
        socket = super().connect_unwaiting(host, port)
        return socket if secret() is None else _signing(socket, NetworkAddress(host, port).to_tcp())


class CommonKVReceiver(engine.CommonKVReceiver):
    """Signs what it sends."""

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """Messages are signed where there is a secret."""
        socket, lock = super()._connect(endpoint, is_ipv6)
        return _signing(socket, endpoint), lock


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Answers only those who have the secret, if any."""

    def _setup_routes(self) -> None:
        """Asks for the secret, before all else."""
        super()._setup_routes()
        if (key := secret()) is not None:
            self.app.middlewares.insert(0, middleware(key))
