"""Asks a PegaFlow server what it holds. What it has is leased until that is loaded or dropped.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from sglang.srt.mem_cache.pegaflow.calls import Lookup
from sglang.srt.mem_cache.pegaflow.connection import Connection
from sglang.srt.mem_cache.pegaflow.loader import release

__all__ = ["BUSY_PROBE_S", "Asker"]

# While a load runs, how often the server is looked at; and the least between two looks that misses give rise to.
BUSY_PROBE_S = 0.2


class Asker:
    """The questions of one process. Only `drop` is called on another thread than the rest."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._leases = threading.Lock()
        self._questions = 0
        # What the server was asked and fetches from a slower tier, and by which name.
        self._fetching: deque[tuple[Lookup, str]] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is a question to put again."""
        return bool(self._fetching)

    def ask_again(self) -> None:
        """Put the question again that has waited longest, if there is one."""
        if self._fetching:
            self._put(*self._fetching.popleft())

    def drop(self, lookup: Lookup) -> bytes:
        """Give up what ``lookup`` has leased, or will; returns the lease that is to be released, b"" if none is."""
        with self._leases:
            lookup.dropped = True
            lease, lookup.lease = lookup.lease, b""
        return lease

    def ask(self, lookup: Lookup) -> None:
        """Put a question to the server."""
        self._questions += 1
        self._put(lookup, f"{self._connection.instance_id}-{self._questions}")

    def _put(self, lookup: Lookup, question: str) -> None:
        """Ask; once more later while the server fetches what was asked for, which holds up nobody else."""
        connection = self._connection
        hits, lease, failed = 0, b"", True
        try:
            if not lookup.dropped and connection.up:
                reply = self._query(lookup.hashes, question)
                if reply is None:
                    lookup.fetching = True
                    self._fetching.append((lookup, question))
                    return
                (hits, lease), failed = reply, False
        except Exception as error:
            connection.renew(error)
        connection.counters.asked += len(lookup.hashes)
        if not hits and connection.up and time.monotonic() - connection.last_probe >= BUSY_PROBE_S:
            # An answer from nobody looks the same.
            connection.probe()
        with self._leases:
            dropped = lookup.dropped
            if not dropped:
                lookup.lease, lookup.leased = lease, hits
        lookup.failed = failed or not connection.up
        lookup.hits = hits
        if dropped and lease:
            release(connection.client, lease)

    def _query(self, hashes: list[bytes], question: str) -> tuple[int, bytes] | None:
        """Pages held, and their lease; None while the server fetches them from a slower tier."""
        reply = self._connection.client.query_prefetch(self._connection.instance_id, hashes, question)
        hits = getattr(reply, "num_hit_blocks", None)
        if hits is None:
            return None
        if not 0 <= hits <= len(hashes):
            # The tree would take it at its word.
            raise ValueError(f"it says that it has {hits} of {len(hashes)} pages")
        return hits, reply.lease
