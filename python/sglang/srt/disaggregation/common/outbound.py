"""Messages to workers that may not read them: sending never blocks.

Upstream: sgl-project/sglang#31144 (merged), which bounds the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import zmq


class NotTaken(Exception):
    """A peer has read nothing for so long that its queue is full."""

    def __init__(self, endpoint: str):
        super().__init__(f"{endpoint} takes no messages: it stands still, or the way to it is cut")


class UnwaitingSocket:
    """One of the engine's sockets, with its lock."""

    def __init__(self, endpoint: str, socket: zmq.Socket, lock: threading.Lock):
        self._endpoint, self._socket, self._lock = endpoint, socket, lock

    def send_multipart(self, frames: Sequence[Any], flags: int = 0) -> Any:
        """Send all frames. Raises ZMQError and `NotTaken`."""
        with self._lock:
            try:
                return self._socket.send_multipart(frames, flags | zmq.NOBLOCK)
            except zmq.Again:
                raise NotTaken(self._endpoint) from None
