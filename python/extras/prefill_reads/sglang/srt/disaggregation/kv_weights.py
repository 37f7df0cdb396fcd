"""Identifies the weights of this worker's KV, so that prefill reads only KV of the same weights from decode.

It uses the namespace of kept KV (`kv_namespace.py`) until a weight update. After that it is unknown: an update may have
failed half way, and peers may have had another.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
from typing import Any

from sglang.srt.mem_cache.kv_namespace import kv_namespace

__all__ = ["KvWeights", "know_weights", "weights_of"]


class KvWeights:
    """Of one rank; for its scheduler's thread only."""

    def __init__(self, name: str | None) -> None:
        """name: of the weights; None if unknown."""
        self._number = None
        if name is not None:
            self._number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    def current(self) -> int | None:
        """A number from 0 to 2**63 - 1 derived from the name; None after a weight update."""
        return self._number

    def changing(self) -> None:
        """An update of the weights begins; its result does not matter."""
        self._number = None


_UNKNOWN = KvWeights(None)


def weights_of(manager: Any) -> KvWeights:
    """Those of a manager's rank. None: a worker without disaggregation."""
    return getattr(manager, "kv_weights", _UNKNOWN)


def know_weights(manager: Any, scheduler: Any) -> Any:
    """Set the weights of a rank's manager. Returns the manager."""
    manager.kv_weights = KvWeights(kv_namespace(scheduler.server_args))
    return manager
