"""One engine process's connection to a PegaFlow server: its calls, in threads of their own, and its way back.

The scheduler thread makes no call itself. It hands over a `Save`, `Lookup` or `Load` and looks at the object later.

Upstream: not in the engine (PR #17221 was closed).
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
from urllib.parse import urlsplit

import torch
from sglang.srt.mem_cache import pegaflow_memory
from sglang.srt.mem_cache.pegaflow_memory import KVLayout

from sglang_pd_radix.supplied import pegaflow_host
from sglang_pd_radix.supplied.pegaflow_host import VERSION

logger = logging.getLogger(__name__)

__all__ = ["Load", "Lookup", "PegaFlowSession", "Save", "check_server", "is_loopback", "server_url"]

# How often an idle connection is looked at, and a lost one tried again.
PROBE_S = 2.0
# While a load runs; and the least between two looks that misses give rise to.
BUSY_PROBE_S = 0.2
# How often the state of running loads is looked at.
POLL_S = 0.001
# A server that has died may have had copies under way; its part of the device driver ends within this.
GRACE_S = 1.0
# Of one Save message: gRPC servers take 4 MiB unless told otherwise.
MAX_SAVE_BYTES = 2 << 20
_BYTES_PER_PAGE = 48


def server_url(endpoint: str) -> str:
    """``endpoint`` (``host:port``, with or without ``http://``) as a URL. Raises ValueError."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    parts = urlsplit(url)
    try:
        complete = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        complete = False
    if not complete:
        raise ValueError(f"--pegaflow-endpoint is {endpoint!r}: give HOST:PORT, for example 127.0.0.1:50055.")
    return url


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def check_server(endpoint: str) -> None:
    """Raise ValueError unless the client is installed and a server of its version listens at ``endpoint``."""
    url = server_url(endpoint)
    version = pegaflow_host.installed_version()
    if version != VERSION:
        found = f"{version} is installed" if version else "it is not installed"
        raise ValueError(f"--enable-pegaflow needs pegaflow-llm=={VERSION}, and {found}: {pegaflow_host.INSTALL}.")
    from pegaflow import EngineRpcClient

    start = f"Start one with `pegaflow-server --addr {urlsplit(url).netloc} --http-addr 127.0.0.1:9091`."
    try:
        client = EngineRpcClient(url)
        client.health()
    except Exception as error:
        raise ValueError(f"--enable-pegaflow: no PegaFlow server answers at {url} ({error}). {start}") from error
    try:
        # A registration of nothing, which the server turns down, but not before it has compared versions.
        client.register_context_batch("version", "version", 0, 0, 1, 1, 0, [], [], [], [], [], [], "direct", False)
    except ValueError:
        return
    except Exception as error:
        raise ValueError(
            f"--enable-pegaflow: the PegaFlow server at {url} does not take this client ({error}). "
            f"Both must be {VERSION}: install pegaflow-llm=={VERSION} and start its pegaflow-server."
        ) from error


@dataclass(eq=False)
class Save:
    """Pages to be copied to the server. They must not change before ``done``.

    slots: int64, the KV slots of whole pages in order. hashes: one per page.
    """

    slots: torch.Tensor
    hashes: list[bytes]
    done: bool = False
    saved: bool = False


@dataclass(eq=False)
class Lookup:
    """A question how many of ``hashes``, from the first on, the server holds; None until it is answered.

    What it holds is leased to this process until the lease is loaded or dropped. failed: there was no answer, which
    counts as none held. fetching: the server has said that it fetches them from a slower tier.
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
    """A copy of leased pages, after the first ``skip``, into ``slots``, which belong to the server until ``final``.

    failed: they will not arrive; the server may yet write to them while not ``final``.
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


@dataclass
class Counters:
    """What has been done, in pages, for `get_internal_state`; ``lost``: how often the server was."""

    saved: int = 0
    saves_failed: int = 0
    asked: int = 0
    hits: int = 0
    loaded: int = 0
    loads_failed: int = 0
    lost: int = 0


class PegaFlowSession:
    """Registers the KV pool, saves, asks and loads; when the server is lost, says so once and goes back to it.

    Two threads: one saves, the other does everything else, so that a long save delays no lookup. ``up`` is False while
    the server is lost; whatever is handed over then has failed at once.
    """

    def __init__(self, endpoint: str, instance_id: str, namespace: str, layout: KVLayout) -> None:
        from pegaflow import EngineRpcClient, PyLoadState

        self.url = server_url(endpoint)
        self.instance_id, self.namespace, self.layout = instance_id, namespace, layout
        self.device = next(iter(layout.buffers.values())).device
        self.device_id = pegaflow_memory.device_id(self.device)
        self.counters = Counters()
        self.up = self.stopped = False
        self._load_state = PyLoadState
        self._client = EngineRpcClient(self.url)
        self._registering = threading.Lock()
        self._leases = threading.Lock()
        self._loading: list[Load] = []
        self._ended: list[Load] = []
        self._saves: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._questions = 0
        # What the server was asked and fetches from a slower tier, and by which name.
        self._fetching: deque[tuple[Lookup, str]] = deque()
        self._registrations = 0
        self._last_probe = 0.0
        self._told = ""
        self._register()
        self.up = True
        for name, run in (("pegaflow-save", self._run_saves), ("pegaflow-load", self._run_calls)):
            threading.Thread(target=run, name=name, daemon=True).start()

    # ---- for the scheduler thread; nothing here waits ----

    def save(self, save: Save) -> None:
        if self.up:
            self._saves.put(save)
        else:
            save.done = True

    def ask(self, lookup: Lookup) -> None:
        if self.up:
            self._calls.put(lambda: self._ask(lookup))
        else:
            lookup.failed, lookup.hits = True, 0

    def drop(self, lookup: Lookup) -> None:
        """Give up what ``lookup`` has leased, or will."""
        with self._leases:
            lookup.dropped = True
            lease, lookup.lease = lookup.lease, b""
        if lease:
            self._calls.put(lambda: self._release(lease))

    def load(self, lookup: Lookup, slots: torch.Tensor, skip: int = 0) -> Load:
        """Load what ``lookup`` has leased, but the first ``skip`` pages, into ``slots``; the lease goes with it.

        slots: int64, of whole pages, no more of them than leased.
        """
        load = Load(lookup.lease, lookup.leased, slots, skip)
        lookup.lease = b""
        self._calls.put(lambda: self._start_load(load))
        return load

    def late(self) -> None:
        """The server has not answered in time: hand nothing more over until it does."""
        self._lost("it has not answered in time")

    def stop(self) -> None:
        """Hand nothing more over, ever; what is under way ends as it would."""
        self.stopped = True
        self.up = False

    def close(self) -> None:
        """Leave the server. Nothing may be under way, and nothing may follow."""
        self.stop()
        self._saves.put(None)
        self._calls.put(None)

    # ---- connection ----

    def _register(self) -> None:
        """Have the server map the KV pool, and watch that this process lives."""
        layout = self.layout
        count = len(layout.names)
        try:
            # What is left of an earlier registration would be in the way.
            self._client.unregister_context(self.instance_id)
        except Exception:
            pass
        self._client.start_session_watcher(self.instance_id, self.namespace, 1, 1)
        ok, message = self._client.register_context_batch(
            self.instance_id,
            self.namespace,
            0,  # To the server each rank is an instance of its own: tp_rank, pp_rank, tp_size, world_size.
            0,
            1,
            1,
            self.device_id,
            layout.names,
            [pegaflow_memory.wrapper_bytes(buffer) for buffer in layout.buffers.values()],
            layout.num_pages,
            layout.page_bytes,
            [0] * count,
            [1] * count,
            "direct",
            False,
        )
        if not ok:
            raise ValueError(f"PegaFlow at {self.url} did not take the KV pool: {message}")
        # What was being loaded under an earlier one has failed.
        self._registrations += 1

    def _lost(self, reason: object) -> None:
        if self.up:
            self.up = False
            self.counters.lost += 1
            logger.warning(
                "PegaFlow at %s is lost: %s. Requests go on without it; it is tried again every %g s.",
                self.url,
                reason,
                PROBE_S,
            )

    def _not_back(self, reason: object) -> None:
        """A server may be there and not take the pool, for good: that is told once."""
        level = logging.DEBUG if str(reason) == self._told else logging.INFO
        self._told = str(reason)
        logger.log(level, "PegaFlow at %s does not take the KV pool yet: %s", self.url, reason)

    def _probe(self) -> bool:
        """Whether the server is there and has the pool mapped; registers anew where it has not."""
        with self._registering:
            self._last_probe = time.monotonic()
            try:
                # A query of a server that is gone counts as a miss, so its health is asked first.
                self._client.health()
            except Exception as error:
                self._lost(error)
                return False
            try:
                self._client.query_prefetch(self.instance_id, [], self.instance_id)
            except Exception as error:
                self._lost(error)
                try:
                    self._register()
                except Exception as error:
                    self._not_back(error)
                    return False
            if not self.up and not self.stopped:
                self.up = True
                logger.info("PegaFlow at %s is back.", self.url)
            return True

    # ---- saving ----

    def _run_saves(self) -> None:
        while True:
            save = self._saves.get()
            if save is None:
                return
            try:
                save.saved = self._save(save)
            except Exception:
                logger.exception("PegaFlow: saving %d pages failed", len(save.hashes))
            if save.saved:
                self.counters.saved += len(save.hashes)
            else:
                self.counters.saves_failed += len(save.hashes)
            save.done = True

    def _save(self, save: Save) -> bool:
        pages = self._pages(save.slots)
        for attempt in range(2):
            try:
                return self._send(pages, save.hashes)
            except Exception as error:
                # Whether it reads them still: not when it is gone, nor when the pool has been registered anew.
                if not self._renew(error) or attempt:
                    return False
        return False

    def _send(self, pages: list[int], hashes: list[bytes]) -> bool:
        layers = self.layout.names
        at_once = max(1, MAX_SAVE_BYTES // (len(layers) * _BYTES_PER_PAGE))
        for start in range(0, len(pages), at_once):
            part, names = pages[start : start + at_once], hashes[start : start + at_once]
            ok, message = self._client.save(self.instance_id, 0, 0, self.device_id, [(n, part, names) for n in layers])
            if not ok:
                logger.debug("PegaFlow: a save of %d pages was turned down: %s", len(part), message)
                return False
        return True

    def _renew(self, error: Exception) -> bool:
        """After a call that failed with ``error``: register anew, so that the server drops whatever it was doing."""
        with self._registering:
            self._lost(error)
            try:
                self._client.health()
                self._register()
            except Exception as reason:
                self._not_back(reason)
                return False
            if not self.stopped:
                self.up = True
                logger.info("PegaFlow at %s is back.", self.url)
            return self.up

    def _pages(self, slots: torch.Tensor) -> list[int]:
        """Pages that the server may now read or write: when no step that has been launched uses them any more.

        What is saved may be what such a step writes. What is loaded to may be a page of a request that ended while the
        step after its last was under way, which still writes one slot of it.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        page = self.layout.page_size
        return (slots[::page] // page).tolist()

    # ---- asking and loading ----

    def _run_calls(self) -> None:
        while True:
            try:
                waits = self._loading or self._ended or self._fetching
                call = self._calls.get(timeout=POLL_S if waits else PROBE_S)
            except queue.Empty:
                pass
            else:
                if call is None:
                    self._leave()
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
        self._look_at_loads()
        if self._fetching:
            self._put(*self._fetching.popleft())
        since = time.monotonic() - self._last_probe
        if since >= (BUSY_PROBE_S if self._loading else PROBE_S) and not self._probe():
            self._fail_loads()

    def _leave(self) -> None:
        try:
            self._client.unregister_context(self.instance_id)
        except Exception as error:
            logger.debug("PegaFlow at %s: %s", self.url, error)

    def _ask(self, lookup: Lookup) -> None:
        self._questions += 1
        self._put(lookup, f"{self.instance_id}-{self._questions}")

    def _put(self, lookup: Lookup, question: str) -> None:
        """Ask; once more later while the server fetches what was asked for, which holds up nobody else."""
        hits, lease, failed = 0, b"", True
        try:
            if not lookup.dropped and self.up:
                reply = self._query(lookup.hashes, question)
                if reply is None:
                    lookup.fetching = True
                    self._fetching.append((lookup, question))
                    return
                (hits, lease), failed = reply, False
        except Exception as error:
            self._renew(error)
        self.counters.asked += len(lookup.hashes)
        if not hits and self.up and time.monotonic() - self._last_probe >= BUSY_PROBE_S:
            # An answer from nobody looks the same.
            self._probe()
        with self._leases:
            dropped = lookup.dropped
            if not dropped:
                lookup.lease, lookup.leased = lease, hits
        lookup.failed = failed or not self.up
        lookup.hits = hits
        if dropped and lease:
            self._release(lease)

    def _query(self, hashes: list[bytes], question: str) -> tuple[int, bytes] | None:
        """Pages held, and their lease; None while the server fetches them from a slower tier."""
        reply = self._client.query_prefetch(self.instance_id, hashes, question)
        hits = getattr(reply, "num_hit_blocks", None)
        if hits is None:
            return None
        if not 0 <= hits <= len(hashes):
            # The tree would take it at its word.
            raise ValueError(f"it says that it has {hits} of {len(hashes)} pages")
        return hits, reply.lease

    def _release(self, lease: bytes) -> None:
        try:
            self._client.release(lease)
        except Exception as error:
            # It has run out, or went with the server.
            logger.debug("PegaFlow: lease not released: %s", error)

    def _start_load(self, load: Load) -> None:
        try:
            pages: list[int | None] = [None] * load.skip + self._pages(load.slots)
            # The other ranks may hold less of it.
            pages += [None] * (load.leased - len(pages))
            load.state = self._load_state()
            # Between two registrations: what one accepts must not fail with the other.
            with self._registering:
                load.registration = self._registrations
                args = load.state.shm_name(), [self.layout.names], [(load.lease, [pages])]
                ok, message = self._client.load(self.instance_id, 0, self.device_id, *args)
            if ok:
                self.counters.hits += len(load.slots) // self.layout.page_size
                self._loading.append(load)
                return
            logger.debug("PegaFlow: a load of %d pages was turned down: %s", len(pages), message)
        except Exception as error:
            if self._is_refused(load, error):
                logger.info("PegaFlow: a load of %d tokens was not begun: %s", len(load.slots), error)
            else:
                self._renew(error)
        self._release(load.lease)
        self._fail(load)

    @staticmethod
    def _is_refused(load: Load, error: Exception) -> bool:
        """Whether ``error`` says only that ``load`` has not begun: it could not be sent, or its lease had run out."""
        return load.state is None or isinstance(error, ValueError) or load.state.get_state() < 0

    def _look_at_loads(self) -> None:
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
                    self.counters.loaded += len(load.slots) // self.layout.page_size
                    load.final = True
                else:
                    self._fail(load)
            elif load.registration != self._registrations:
                self._loading.remove(load)
                self._fail(load)
        for load in self._ended[:]:
            if now - load.failed_at >= GRACE_S:
                self._ended.remove(load)
                load.final = True

    def _fail(self, load: Load) -> None:
        self.counters.loads_failed += len(load.slots) // self.layout.page_size
        load.failed, load.failed_at = True, time.monotonic()
        self._ended.append(load)

    def _fail_loads(self) -> None:
        """What was being loaded by a server that is gone."""
        for load in self._loading:
            self._fail(load)
        self._loading.clear()
