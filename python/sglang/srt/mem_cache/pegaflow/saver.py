"""Saves pages to a PegaFlow server, in a thread of its own, so that a long save delays no lookup.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import queue

from sglang.srt.mem_cache.pegaflow.calls import Save
from sglang.srt.mem_cache.pegaflow.connection import Connection

logger = logging.getLogger(__name__)

__all__ = ["Saver"]

# Of one Save message: gRPC servers take 4 MiB unless told otherwise.
MAX_SAVE_BYTES = 2 << 20
_BYTES_PER_PAGE = 48


class Saver:
    """Saves what is put into ``saves``, in this order; None ends it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread's loop."""
        while True:
            save = self.saves.get()
            if save is None:
                return
            try:
                save.saved = self._save(save)
            except Exception:
                logger.exception("PegaFlow: saving %d pages failed", len(save.hashes))
            if save.saved:
                self._connection.counters.saved += len(save.hashes)
            else:
                self._connection.counters.saves_failed += len(save.hashes)
            save.done = True

    def _save(self, save: Save) -> bool:
        pages = self._connection.pages(save.slots)
        for attempt in range(2):
            try:
                return self._send(pages, save.hashes)
            except Exception as error:
                # Whether it reads them still: not when it is gone, nor when the pool has been registered anew.
                if not self._connection.renew(error) or attempt:
                    return False
        return False

    def _send(self, pages: list[int], hashes: list[bytes]) -> bool:
        connection = self._connection
        layers = connection.layout.names
        at_once = max(1, MAX_SAVE_BYTES // (len(layers) * _BYTES_PER_PAGE))
        for start in range(0, len(pages), at_once):
            part, names = pages[start : start + at_once], hashes[start : start + at_once]
            ok, message = connection.client.save(
                connection.instance_id, 0, 0, connection.device_id, [(n, part, names) for n in layers]
            )
            if not ok:
                logger.debug("PegaFlow: a save of %d pages was turned down: %s", len(part), message)
                return False
        return True
