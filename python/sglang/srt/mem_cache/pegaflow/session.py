"""One engine process's use of a PegaFlow server: what it hands over is done in threads of its own.

The scheduler thread makes no call itself. It hands over a `Save`, `Lookup` or `Load` and looks at the object later.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch
from sglang.srt.mem_cache.pegaflow.asker import BUSY_PROBE_S, Asker
from sglang.srt.mem_cache.pegaflow.calls import Counters, Load, Lookup, Save
from sglang.srt.mem_cache.pegaflow.connection import Connection
from sglang.srt.mem_cache.pegaflow.loader import Loader, release
from sglang.srt.mem_cache.pegaflow.memory import KVLayout
from sglang.srt.mem_cache.pegaflow.saver import Saver

logger = logging.getLogger(__name__)

__all__ = ["PegaFlowSession"]

# How often an idle connection is looked at, and a lost one tried again.
PROBE_S = 2.0
# How often the state of running loads is looked at.
POLL_S = 0.001


class PegaFlowSession:
    """Saves, asks and loads; when the server is lost, goes on without it and goes back to it.

    Two threads: one saves, the other does everything else, so that a long save delays no lookup. ``up`` is False while
    the server is lost; whatever is handed over then has failed at once.
    """

    def __init__(self, endpoint: str, instance_id: str, namespace: str, layout: KVLayout) -> None:
        from pegaflow import PyLoadState

        connection = self.connection = Connection(endpoint, instance_id, namespace, layout, PROBE_S)
        self.saver, self.asker, self.loader = Saver(connection), Asker(connection), Loader(connection, PyLoadState)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for name, run in (("pegaflow-save", self.saver.run), ("pegaflow-load", self._run_calls)):
            threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def up(self) -> bool:
        """Whether the server is there, and is used."""
        return self.connection.up

    @property
    def stopped(self) -> bool:
        """Whether it is used no more."""
        return self.connection.stopped

    @property
    def counters(self) -> Counters:
        """What has been done, in pages."""
        return self.connection.counters

    # ---- for the scheduler thread; nothing here waits ----

    def save(self, save: Save) -> None:
        """Save its pages."""
        if self.up:
            self.saver.saves.put(save)
        else:
            save.done = True

    def ask(self, lookup: Lookup) -> None:
        """Ask how much the server holds."""
        if self.up:
            self._calls.put(lambda: self.asker.ask(lookup))
        else:
            lookup.failed, lookup.hits = True, 0

    def drop(self, lookup: Lookup) -> None:
        """Give up what ``lookup`` has leased, or will."""
        lease = self.asker.drop(lookup)
        if lease:
            self._calls.put(lambda: release(self.connection.client, lease))

    def load(self, lookup: Lookup, slots: torch.Tensor, skip: int = 0) -> Load:
        """Load what ``lookup`` has leased, but the first ``skip`` pages, into ``slots``; the lease goes with it.

        slots: int64, of whole pages, no more of them than leased.
        """
        load = Load(lookup.lease, lookup.leased, slots, skip)
        lookup.lease = b""
        self._calls.put(lambda: self.loader.start(load))
        return load

    def late(self) -> None:
        """The server has not answered in time: hand nothing more over until it does."""
        self.connection.lost("it has not answered in time")

    def stop(self) -> None:
        """Hand nothing more over, ever; what is under way ends as it would."""
        self.connection.stop()

    def close(self) -> None:
        """Leave the server. Nothing may be under way, and nothing may follow."""
        self.stop()
        self.saver.saves.put(None)
        self._calls.put(None)

    # ---- the thread of questions and loads ----

    def _run_calls(self) -> None:
        while True:
            try:
                waits = self.loader.busy or self.asker.busy
                call = self._calls.get(timeout=POLL_S if waits else PROBE_S)
            except queue.Empty:
                pass
            else:
                if call is None:
                    self.connection.leave()
                    return
                try:
                    call()
                except Exception:
                    logger.exception("PegaFlow: a call failed")
            try:
                self._look_around()
            except Exception:
                # This thread must go on: requests wait for it.
                logger.exception("PegaFlow: the loads were not looked at")
                time.sleep(BUSY_PROBE_S)

    def _look_around(self) -> None:
        self.loader.look()
        self.asker.ask_again()
        since = time.monotonic() - self.connection.last_probe
        if since >= (BUSY_PROBE_S if self.loader.is_loading else PROBE_S) and not self.connection.probe():
            self.loader.fail_all()
