"""Which weights the KV in this worker's tree is of, so that prefill reads none of others from decode.

It goes by the name under which KV is kept elsewhere too (`kv_namespace.py`), until the weights are updated: nothing
says whether an update has failed half way, or which update a peer has had.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
from typing import Any

from sglang.srt.mem_cache.kv_namespace import kv_namespace

__all__ = ["KvWeights", "know_weights", "weights_of"]


class KvWeights:
    """Of one rank. Used by its scheduler's thread alone."""

    def __init__(self, name: str | None) -> None:
        """name: of the weights; None where nothing is known of them."""
        self._number = None
        if name is not None:
            self._number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    def current(self) -> int | None:
        """A number from 0 to 2**63 - 1 for the name; None once the weights have been updated."""
        return self._number

    def changing(self) -> None:
        """The weights are about to be updated, whatever comes of it."""
        self._number = None


_UNKNOWN = KvWeights(None)


def weights_of(manager: Any) -> KvWeights:
    """Those of the rank of a manager; None is that of a worker without disaggregation."""
    return getattr(manager, "kv_weights", _UNKNOWN)


def know_weights(manager: Any, scheduler: Any) -> Any:
    """The manager of a rank, which now knows the weights of its KV."""
    manager.kv_weights = KvWeights(kv_namespace(scheduler.server_args))
    return manager
