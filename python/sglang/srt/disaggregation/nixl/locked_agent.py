"""A NIXL agent that several threads of a prefill worker use.

Upstream: none is known.
"""

from __future__ import annotations

import threading


class LockedAgent:
    """Lets one thread at a time call the agent; NIXL locks only if it listens on a port."""

    def __init__(self, agent):
        self._agent, self._lock = agent, threading.Lock()

    def __getattr__(self, name: str):
        value = getattr(self._agent, name)
        if not callable(value):
            return value

        def locked(*args, **kwargs):
            with self._lock:
                return value(*args, **kwargs)

        setattr(self, name, locked)
        return locked
