"""The servers of a deployment as processes, and how to end them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .. import process_group
from .logs import obituary


@dataclass
class Process:
    """One server: its role, address and log.

    It starts when all processes of lower ``wave`` are ready. ``ready_s``: None until its first healthy answer.
    """

    role: str
    name: str
    url: str
    log_path: Path
    command: list[str]
    env: dict[str, str]
    bootstrap_port: int | None = None
    wave: int = 0
    pid: int = 0
    ready_s: float | None = None
    phase: str = "waiting"
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def is_worker(self) -> bool:
        """Whether it is an engine."""
        return self.role not in ("router", "pegaflow")

    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None before its end."""
        return self.popen.poll() if self.popen else None

    def describe(self) -> dict[str, Any]:
        """Its entry in the JSON file of ``pd-radix up``."""
        entry: dict[str, Any] = {"role": self.role, "name": self.name, "url": self.url, "pid": self.pid}
        if self.bootstrap_port is not None:
            entry["bootstrap_port"] = self.bootstrap_port
        return {**entry, "log": str(self.log_path), "command": self.command}

    def obituary(self) -> str:
        """Why it has ended, and the end of its log. Call after its end."""
        code = self.returncode()
        assert code is not None
        return obituary(self.name, code, self.log_path)


@dataclass(frozen=True)
class Progress:
    """``process`` (None: the whole cluster) entered ``phase``, ``elapsed_s`` seconds after the start."""

    process: Process | None
    phase: str
    elapsed_s: float

    @property
    def is_ready(self) -> bool:
        """Whether the process serves from here on."""
        return self.phase.startswith(("ready", "serving"))

    def __str__(self) -> str:
        return f"[{self.elapsed_s:5.1f} s] {self.process.name if self.process else 'cluster'}: {self.phase}"


def first_dead(processes: Sequence[Process]) -> Process | None:
    """The first that has ended, if any has."""
    return next((process for process in processes if process.returncode() is not None), None)


def check_alive(processes: Sequence[Process]) -> None:
    """Raise PdRadixError, with the reason and the end of its log, if one has ended."""
    process = first_dead(processes)
    if process is not None:
        raise PdRadixError(process.obituary())


class Family:
    """The process groups of one cluster, and the watchdog that outlives a killed owner."""

    def __init__(self) -> None:
        self._watchdog: subprocess.Popen[bytes] | None = None
        # What may run. The number of one that has ended may be a stranger's soon.
        self._groups: set[int] = set()

    def start(self, process: Process) -> None:
        """Start it, and have the watchdog know; in one piece, since nobody else would end what is not known."""
        with process_group.ends_held_back():
            self._start(process)

    def _start(self, process: Process) -> None:
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", process_group.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.ended(process)
        process.log_path.parent.mkdir(parents=True, exist_ok=True)
        with process.log_path.open("wb") as log:
            process.popen = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=process.env,
                start_new_session=True,
            )
        process.pid = process.popen.pid
        self._groups.add(process.pid)
        self._tell("+", process.pid)

    def ended(self, process: Process) -> None:
        """Leave a server alone from here on, of which nothing runs any more: it was killed, or is started again."""
        if process.pid in self._groups:
            self._groups.remove(process.pid)
            self._tell("-", process.pid)

    def _tell(self, sign: str, pid: int) -> None:
        if self._watchdog and self._watchdog.stdin:
            with contextlib.suppress(OSError):
                self._watchdog.stdin.write(f"{sign} {pid}\n".encode())
                self._watchdog.stdin.flush()

    def stop(self, processes: Sequence[Process], grace_s: float) -> None:
        """End every process of every group: ask, wait up to ``grace_s`` seconds for all together, then kill."""
        started = [p for p in processes if p.popen and p.pid in self._groups]
        for process in started:
            assert process.popen
            if process.popen.poll() is None:
                # Only the leader is asked: it knows in which order to end its own workers.
                with contextlib.suppress(ProcessLookupError):
                    process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        running = list(started)
        while running:
            late = time.monotonic() >= deadline
            for process in running[:]:
                # What a leader that has ended left behind has nobody to work for.
                if late or process.returncode() is not None:
                    process_group.kill(process.pid)
                    running.remove(process)
            time.sleep(0.02)
        deadline = time.monotonic() + 10
        for process in started:
            assert process.popen
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=max(0.1, deadline - time.monotonic()))
            process_group.wait_gone(process.pid, deadline - time.monotonic())
            self.ended(process)
        if self._watchdog and self._watchdog.stdin:
            # Somebody may have killed it: then the pipe is broken, which is no news to whoever stops the servers.
            with contextlib.suppress(OSError):
                self._watchdog.stdin.close()
            self._watchdog.wait(timeout=10)
            self._watchdog = None
