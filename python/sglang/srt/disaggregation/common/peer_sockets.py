"""A worker's sockets for the engine's messages to peers: of one ZeroMQ context, and closed when nobody needs them.

The engine makes a context, with two threads, for each peer, and keeps it for good.

Upstream: none is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

# Sockets of one context. ZeroMQ's default is 1023, and prefills at new addresses come before old ones are given up.
MOST_SOCKETS = 8192
# Seconds after which a socket is closed that nobody uses, to no worker in use; what waits in it has as long to go.
UNUSED_S = 900.0


class PeerSockets:
    """One socket for each peer, which threads may share: those of all messages to it, which keep their order.

    Whoever sends to one whose queue is full waits, as in the engine; closing does not wait for that.
    """

    def __init__(self, context: zmq.Context):
        self._context, self._lock = context, threading.Lock()
        self._sockets: dict[str, tuple[Any, threading.Lock]] = {}
        self._used_at: dict[str, float] = {}

    def socket_endpoints(self) -> list[str]:
        """To what there are sockets, as ZeroMQ writes it."""
        with self._lock:
            return list(self._sockets)

    def connect(self, endpoint: str, is_ipv6: bool = False) -> PeerSocket:
        """What sends to a peer. Raises ZMQError where no more sockets can be made."""
        self._get(endpoint, is_ipv6)
        return PeerSocket(self, endpoint, is_ipv6)

    def send(self, endpoint: str, is_ipv6: bool, frames: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send all frames to a peer. Raises ZMQError."""
        socket, lock = self._get(endpoint, is_ipv6)
        with lock:
            return socket.send_multipart(frames, *args, **kwargs)

    def _get(self, endpoint: str, is_ipv6: bool) -> tuple[Any, threading.Lock]:
        with self._lock:
            if endpoint not in self._sockets:
                socket = self._context.socket(zmq.PUSH)
                if is_ipv6:
                    socket.setsockopt(zmq.IPV6, 1)
                socket.connect(endpoint)
                self._sockets[endpoint] = socket, threading.Lock()
            self._used_at[endpoint] = time.monotonic()
            return self._sockets[endpoint]

    def close_socket(self, endpoint: str, unused_s: float | None = None) -> None:
        """Close the socket to a peer that is gone; the next message makes a new one.

        unused_s: only if it has not been used for so many seconds, and what waits in it has as long to go.
        """
        with self._lock:
            if endpoint not in self._sockets:
                return
            if unused_s is not None and time.monotonic() - self._used_at[endpoint] < unused_s:
                return
            socket, lock = self._sockets[endpoint]
            if not lock.acquire(blocking=False):
                # Somebody sends, and may wait for the peer.
                return
            del self._sockets[endpoint], self._used_at[endpoint]
        try:
            socket.close(linger=int(1000 * (unused_s or 0)))
        finally:
            lock.release()


class PeerSocket:
    """Stands for the socket to one peer, which may be closed between two messages."""

    def __init__(self, sockets: PeerSockets, endpoint: str, is_ipv6: bool):
        self._sockets, self._endpoint, self._is_ipv6 = sockets, endpoint, is_ipv6

    def send_multipart(self, frames: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send all frames. Raises ZMQError."""
        return self._sockets.send(self._endpoint, self._is_ipv6, frames, *args, **kwargs)
