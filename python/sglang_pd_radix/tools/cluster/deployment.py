"""A deployment: start, use, pause, partial kill, end."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .. import process_group
from .local_http import ADMIN_API_KEY, API_KEY, freeze, http
from .options import has_option
from .plan import lay_out
from .process import Family, Process, Progress, check_alive, first_dead
from .spec import Spec
from .startup import Startup

# Long enough for the engine to drain, short enough after Ctrl-C.
STOP_GRACE_S = 5.0


class Cluster:
    """A deployment on this machine. Its parameters are those of `Spec` (None: the default).

    `start` starts it. ``log_dir``: a new temporary directory by default. ``timeout_s``: longest start, seconds.
    ``on_progress`` is called at every step. ``on_wait`` is called every 0.1 s while waiting; what it raises ends the
    start.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        log_dir: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
        on_progress: Callable[[Progress], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        **spec: Any,
    ) -> None:
        self.spec = Spec(model_path, **{name: value for name, value in spec.items() if value is not None})
        self._log_dir = Path(log_dir) if log_dir else None
        self._timeout_s, self._on_progress, self._on_wait = timeout_s, on_progress, on_wait
        self._family = Family()
        self._stopping = threading.Event()
        self.processes: list[Process] = []

    # -- what it looks like

    @property
    def model_path(self) -> str:
        return str(self.spec.model_path)

    @property
    def backend(self) -> str:
        """The KV transfer backend."""
        return self.spec.backend

    @property
    def aggregated(self) -> bool:
        """Whether it is one ordinary engine."""
        return self.spec.aggregated

    @property
    def log_dir(self) -> Path:
        """The logs' directory; it stays after the end."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="pd-radix-"))
        return self._log_dir

    def _role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    @property
    def router_url(self) -> str:
        """The address for requests: the router, or the engine if aggregated."""
        return self._role("engine" if self.aggregated else "router")[0].url

    @property
    def router_urls(self) -> dict[str, str]:
        """Addresses of routers by their name in ``routers`` ("router" for the single one)."""
        return {process.name.removeprefix("router-"): process.url for process in self._role("router")}

    @property
    def prefill_urls(self) -> list[str]:
        return [process.url for process in self._role("prefill")]

    @property
    def decode_urls(self) -> list[str]:
        return [process.url for process in self._role("decode")]

    @property
    def engine_urls(self) -> list[str]:
        """Of the ordinary engines."""
        return [process.url for process in self._role("engine")]

    def describe(self) -> dict[str, Any]:
        """This cluster for scripts, ready for JSON."""
        return {
            "model": self.model_path,
            "backend": None if self.aggregated else self.backend,
            "router_url": self.router_url,
            "prefill_urls": self.prefill_urls,
            "decode_urls": self.decode_urls,
            "log_dir": str(self.log_dir),
            "processes": [process.describe() for process in self.processes],
        }

    # -- life

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def plan(self) -> list[Process]:
        """The processes that `start` would start now."""
        return lay_out(self.spec, self.log_dir)

    def start(self) -> None:
        """Start everything; returns after a successful request. A failure leaves nothing running.

        Raises PdRadixError if a process ends (with the reason and the end of its log) or the time is up.
        """
        if self.processes:
            raise PdRadixError("this cluster was started before: make a new one")
        self.processes = self.plan()
        if self.spec.api_key is not None:
            os.environ[API_KEY] = self.spec.api_key
        if self.spec.admin_api_key is not None:
            os.environ[ADMIN_API_KEY] = self.spec.admin_api_key
        startup = self._startup(self.processes)
        try:
            for wave in sorted({process.wave for process in self.processes}):
                together = [process for process in self.processes if process.wave == wave]
                for process in together:
                    self._family.start(process)
                    startup.report(process, "starting")
                startup.ask(together)
                startup.wait_ready(together)
            startup.report(None, "sending a request through")
            tokenizes = not any(has_option(args, "--skip-tokenizer-init") for _, _, args in self.spec.engines())
            for url in self.router_urls.values() or [self.router_url]:
                startup.wait_served(url, tokenizes)
            startup.call(lambda: self._settle(startup), lambda: "a worker does not answer /flush_cache or /freeze_gc")
            startup.report(None, "serving")
        except BaseException:
            self.stop()
            raise

    def _settle(self, startup: Startup) -> None:
        """Empty caches after the first request, and exclude loaded objects from garbage collection."""
        for worker in self.processes:
            if worker.is_worker:
                http(worker.url + "/flush_cache", {}, timeout=10)
                self._freeze(worker, startup)

    @staticmethod
    def _freeze(worker: Process, startup: Startup) -> None:
        if wrong := freeze(worker.url):
            startup.report(worker, f"ready, but {wrong}")

    def _startup(self, watched: Sequence[Process]) -> Startup:
        return Startup(watched, self._timeout_s, self.log_dir, self._stopping, self._on_progress, self._on_wait)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End all processes and wait for them. May be called twice, and after a failed start."""
        self._stopping.set()
        self.resume()  # a paused process gets no SIGTERM
        self._family.stop(self.processes, grace_s)

    def pause(self, names: Collection[str]) -> None:
        """Pause the processes of these servers (SIGSTOP): they keep their memory and use no CPU.

        An idle engine polls without a break, which slows down others on a small machine.
        """
        self._signal(names, signal.SIGSTOP)

    def resume(self, names: Collection[str] | None = None) -> None:
        """Resume paused servers, all by default."""
        self._signal(names, signal.SIGCONT)

    def _signal(self, names: Collection[str] | None, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.popen and process.returncode() is None and (names is None or process.name in names):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)

    def _named(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def kill(self, name: str) -> None:
        """Kill one server's processes at once (SIGKILL), like a crash."""
        process = self._named(name)
        process_group.kill(process.pid, tracker_s=0.0)
        assert process.popen
        process.popen.wait(timeout=10)
        process_group.wait_gone(process.pid, 10)
        self._family.ended(process)

    def restart(self, name: str) -> None:
        """Start an ended server again, with the same command and ports, and wait until it is ready.

        Others may end meanwhile. Raises PdRadixError if this one ends or the time is up.
        """
        startup = self.start_again(name)
        while not self.has_started(name, startup):
            time.sleep(0.1)

    def start_again(self, name: str) -> Startup:
        """Begin `restart` without waiting; poll `has_started`."""
        process = self._named(name)
        process.ready_s = None
        startup = self._startup([process])
        self._family.start(process)
        startup.ask([process])
        return startup

    def has_started(self, name: str, startup: Startup) -> bool:
        """Whether a server that is started again is ready. Raises PdRadixError as `restart`."""
        process = self._named(name)
        if not startup.are_ready([process]):
            return False
        if process.is_worker:
            startup.call(lambda: self._freeze(process, startup), lambda: f"{name} does not answer /freeze_gc")
        return True

    def leave_out(self, name: str) -> None:
        """Continue without an ended server."""
        self.kill(name)
        self.processes.remove(self._named(name))

    def dead(self) -> Process | None:
        """The first ended process, if any."""
        return first_dead(self.processes)

    def alive(self) -> bool:
        """Whether every process of the started cluster runs."""
        return bool(self.processes) and all(p.popen is not None for p in self.processes) and self.dead() is None

    def check(self) -> None:
        """Raise PdRadixError, with the reason and the end of its log, if a process has ended."""
        check_alive(self.processes)
