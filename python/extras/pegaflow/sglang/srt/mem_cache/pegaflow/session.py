"""Calls of one engine process to a PegaFlow server, made in threads.

The scheduler thread makes no call. It hands over a `Save`, `Lookup` or `Load` and reads the object's state later.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.pegaflow.connection import Connection, Counters
from sglang.srt.mem_cache.pegaflow.memory import KVLayout

logger = logging.getLogger(__name__)

__all__ = ["Asker", "Load", "Loader", "Lookup", "PegaFlowSession", "Save", "Saver"]

# Seconds between probes, of an idle connection and of a lost one.
PROBE_S = 2.0
# Seconds between checks of running loads.
POLL_S = 0.001
# Seconds between probes while a load runs; also the least between two probes caused by misses.
BUSY_PROBE_S = 0.2
# A server that died may have had copies running; the device driver ends them within this many seconds.
GRACE_S = 1.0
# Of one Save message: gRPC servers accept 4 MiB by default.
MAX_SAVE_BYTES = 2 << 20
_BYTES_PER_PAGE = 48


@dataclass(eq=False)
class Save:
    """Pages to be copied to the server. They must not change before ``done``.

    slots: int64, the KV slots of whole pages in order. hashes: one per page.
    """

    slots: torch.Tensor
    hashes: list[bytes]
    done: bool = False
    saved: bool = False

    def is_done(self) -> bool:
        """Whether the server no longer reads the pages."""
        return self.done


@dataclass(eq=False)
class Lookup:
    """A look-up: how many of ``hashes``, from the first on, the server holds (``hits``; None until answered).

    Pages found are leased to this process until the lease is loaded or dropped. failed: no answer, which counts as 0
    hits. fetching: the server is fetching them from a slower tier.
    """

    hashes: list[bytes]
    failed: bool = False
    fetching: bool = False
    hits: int | None = None
    lease: bytes = b""
    leased: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Load:
    """A copy of leased pages, after the first ``skip``, into ``slots``, which the server may write until ``final``.

    failed: the pages will not arrive.
    """

    lease: bytes
    leased: int
    slots: torch.Tensor
    skip: int = 0
    final: bool = False
    failed: bool = False
    state: Any = None
    registration: int = 0
    failed_at: float = 0.0

    def is_done(self) -> bool:
        """Whether the server no longer writes to the pages."""
        return self.final


def release(client: Any, lease: bytes) -> None:
    try:
        client.release(lease)
    except Exception as error:
        # It has expired, or the server is lost.
        logger.debug("PegaFlow: lease not released: %s", error)


class Saver:
    """Processes ``saves`` in order, in its own thread; None ends it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()

    def run(self) -> None:
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
                # The server reads them no longer if it is lost or the pool was registered again.
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
                logger.debug("PegaFlow: a save of %d pages was rejected: %s", len(part), message)
                return False
        return True


class Asker:
    """Looks up pages. Found pages are leased until they are loaded or dropped.

    `drop` is called by the scheduler thread, the rest by the session's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._leases = threading.Lock()
        self._questions = 0
        # Look-ups that the server fetches from a slower tier, with their question ids.
        self._fetching: deque[tuple[Lookup, str]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a look-up must be repeated."""
        return bool(self._fetching)

    def ask_again(self) -> None:
        """Repeat the look-up that has waited longest, if there is one."""
        if self._fetching:
            self._put(*self._fetching.popleft())

    def drop(self, lookup: Lookup) -> bytes:
        """Cancel ``lookup``, answered or not; returns the lease to release, b"" if there is none."""
        with self._leases:
            lookup.dropped = True
            lease, lookup.lease = lookup.lease, b""
        return lease

    def ask(self, lookup: Lookup) -> None:
        self._questions += 1
        self._put(lookup, f"{self._connection.instance_id}-{self._questions}")

    def _put(self, lookup: Lookup, question: str) -> None:
        """Send a look-up; it is repeated later, without blocking others, while the server fetches the pages."""
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
            # A lost server looks like a miss.
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
        """Pages held and their lease; None while the server fetches them from a slower tier."""
        reply = self._connection.client.query_prefetch(self._connection.instance_id, hashes, question)
        hits = getattr(reply, "num_hit_blocks", None)
        if hits is None:
            return None
        if not 0 <= hits <= len(hashes):
            # The tree would rely on this number.
            raise ValueError(f"it reports {hits} hits for {len(hashes)} pages")
        return hits, reply.lease


class Loader:
    """Running loads, and failed ones that the server may still write to.

    load_state: makes the state that the server and this process share for a load, the client's PyLoadState.
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
        """Whether any load must be checked."""
        return bool(self._loading or self._ended)

    def start(self, load: Load) -> None:
        """Begin a load, or mark it failed."""
        connection = self._connection
        try:
            pages: list[int | None] = [None] * load.skip + connection.pages(load.slots)
            # Other ranks may hold less of it.
            pages += [None] * (load.leased - len(pages))
            load.state = self.load_state()
            # Not across registrations: a load accepted under one must not fail with the next.
            with connection.registering:
                load.registration = connection.registrations
                args = load.state.shm_name(), [connection.layout.names], [(load.lease, [pages])]
                ok, message = connection.client.load(connection.instance_id, 0, connection.device_id, *args)
            if ok:
                connection.counters.hits += len(load.slots) // connection.layout.page_size
                self._loading.append(load)
                return
            logger.debug("PegaFlow: a load of %d pages was rejected: %s", len(pages), message)
        except Exception as error:
            if self._is_refused(load, error):
                logger.info("PegaFlow: a load of %d tokens did not start: %s", len(load.slots), error)
            else:
                connection.renew(error)
        release(connection.client, load.lease)
        self._fail(load)

    @staticmethod
    def _is_refused(load: Load, error: Exception) -> bool:
        """Whether ``load`` has not begun: it could not be sent, or its lease had expired."""
        return load.state is None or isinstance(error, ValueError) or load.state.get_state() < 0

    def look(self) -> None:
        """Check the state of running loads."""
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
        """Mark all running loads failed: the server is lost."""
        for load in self._loading:
            self._fail(load)
        self._loading.clear()


class PegaFlowSession:
    """Saves, looks up and loads; continues without the server while it is lost.

    Two threads: one saves, the other does the rest, so that a long save does not delay look-ups. ``up`` is False while
    the server is lost; calls then fail at once.
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
        """Whether the server is reachable and in use."""
        return self.connection.up

    @property
    def stopped(self) -> bool:
        """Whether it was stopped for good."""
        return self.connection.stopped

    @property
    def counters(self) -> Counters:
        """Counters, in pages."""
        return self.connection.counters

    # ---- for the scheduler thread; nothing here blocks ----

    def save(self, save: Save) -> None:
        """Save its pages, or mark it done if the server is lost."""
        if self.up:
            self.saver.saves.put(save)
        else:
            save.done = True

    def ask(self, lookup: Lookup) -> None:
        """Look up how many pages the server holds."""
        if self.up:
            self._calls.put(lambda: self.asker.ask(lookup))
        else:
            lookup.failed, lookup.hits = True, 0

    def drop(self, lookup: Lookup) -> None:
        """Cancel ``lookup`` and release its lease, present or future."""
        lease = self.asker.drop(lookup)
        if lease:
            self._calls.put(lambda: release(self.connection.client, lease))

    def load(self, lookup: Lookup, slots: torch.Tensor, skip: int = 0) -> Load:
        """Load the pages leased by ``lookup`` after the first ``skip`` into ``slots``; takes over the lease.

        slots: int64, whole pages, at most as many as leased.
        """
        load = Load(lookup.lease, lookup.leased, slots, skip)
        lookup.lease = b""
        self._calls.put(lambda: self.loader.start(load))
        return load

    def late(self) -> None:
        """The server timed out: hand nothing over until it responds."""
        self.connection.lost("it has not answered in time")

    def stop(self) -> None:
        """Hand nothing over any more; running calls end as usual."""
        self.connection.stop()

    def close(self) -> None:
        """Unregister from the server. Nothing may be running, and no call may follow."""
        self.stop()
        self.saver.saves.put(None)
        self._calls.put(None)

    # ---- the thread for look-ups and loads ----

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
                # This thread must continue: requests wait for it.
                logger.exception("PegaFlow: could not check the loads")
                time.sleep(BUSY_PROBE_S)

    def _look_around(self) -> None:
        self.loader.look()
        self.asker.ask_again()
        since = time.monotonic() - self.connection.last_probe
        if since >= (BUSY_PROBE_S if self.loader.is_loading else PROBE_S) and not self.connection.probe():
            self.loader.fail_all()
