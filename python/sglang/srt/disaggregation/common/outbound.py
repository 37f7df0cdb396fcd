"""Messages to workers that may not read them: nobody waits until they do.

Upstream: sgl-project/sglang#31144 (merged), which bounds the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq


class NotTaken(Exception):
    """A peer has not read for so long that nothing more can be queued for it."""

    def __init__(self, endpoint: str):
        super().__init__(f"{endpoint} takes no messages: it stands still, or the way to it is cut")


class UnwaitingSocket:
    """A socket to one worker over which a message goes, to it or to its queue, or is refused with `NotTaken`.

    In ZeroMQ whoever sends waits for a peer whose queue is full, and with him who wants the socket's lock.
    """

    def __init__(self, socket: Any, endpoint: str):
        self._socket, self._endpoint = socket, endpoint

    def send_multipart(self, frames: Sequence[Any], flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Send all frames or none."""
        try:
            return self._socket.send_multipart(frames, flags | zmq.NOBLOCK, *args, **kwargs)
        except zmq.Again:
            raise NotTaken(self._endpoint) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
