"""Loads pages from a PegaFlow server. All of it runs in one thread.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.pegaflow.calls import Load
from sglang.srt.mem_cache.pegaflow.connection import Connection

logger = logging.getLogger(__name__)

__all__ = ["Loader", "release"]

# A server that has died may have had copies under way; its part of the device driver ends within this.
GRACE_S = 1.0


def release(client: Any, lease: bytes) -> None:
    """Give a lease back."""
    try:
        client.release(lease)
    except Exception as error:
        # It has run out, or went with the server.
        logger.debug("PegaFlow: lease not released: %s", error)


class Loader:
    """The loads under way, and those that have failed and may still be written to.

    load_state: makes what the server and this process share of a load, the client's PyLoadState.
    """

    def __init__(self, connection: Connection, load_state: Callable[[], Any]) -> None:
        self._connection, self.load_state = connection, load_state
        self._loading: list[Load] = []
        self._ended: list[Load] = []

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def busy(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._loading or self._ended)

    def start(self, load: Load) -> None:
        """Begin a load. If it cannot be begun it has failed."""
        connection = self._connection
        try:
            pages: list[int | None] = [None] * load.skip + connection.pages(load.slots)
            # The other ranks may hold less of it.
            pages += [None] * (load.leased - len(pages))
            load.state = self.load_state()
            # Between two registrations: what one accepts must not fail with the other.
            with connection.registering:
                load.registration = connection.registrations
                args = load.state.shm_name(), [connection.layout.names], [(load.lease, [pages])]
                ok, message = connection.client.load(connection.instance_id, 0, connection.device_id, *args)
            if ok:
                connection.counters.hits += len(load.slots) // connection.layout.page_size
                self._loading.append(load)
                return
            logger.debug("PegaFlow: a load of %d pages was turned down: %s", len(pages), message)
        except Exception as error:
            if self._is_refused(load, error):
                logger.info("PegaFlow: a load of %d tokens was not begun: %s", len(load.slots), error)
            else:
                connection.renew(error)
        release(connection.client, load.lease)
        self._fail(load)

    @staticmethod
    def _is_refused(load: Load, error: Exception) -> bool:
        """Whether ``error`` says only that ``load`` has not begun: it could not be sent, or its lease had run out."""
        return load.state is None or isinstance(error, ValueError) or load.state.get_state() < 0

    def look(self) -> None:
        """Learn what has become of the loads under way."""
        connection = self._connection
        now = time.monotonic()
        for load in self._loading[:]:
            try:
                state = load.state.get_state()
            except Exception:
                logger.exception("PegaFlow: the state of a load cannot be read")
                state = -1
            if state:
                self._loading.remove(load)
                if state > 0:
                    connection.counters.loaded += len(load.slots) // connection.layout.page_size
                    load.final = True
                else:
                    self._fail(load)
            elif load.registration != connection.registrations:
                self._loading.remove(load)
                self._fail(load)
        for load in self._ended[:]:
            if now - load.failed_at >= GRACE_S:
                self._ended.remove(load)
                load.final = True

    def _fail(self, load: Load) -> None:
        self._connection.counters.loads_failed += len(load.slots) // self._connection.layout.page_size
        load.failed, load.failed_at = True, time.monotonic()
        self._ended.append(load)

    def fail_all(self) -> None:
        """What was being loaded by a server that is gone."""
        for load in self._loading:
            self._fail(load)
        self._loading.clear()
