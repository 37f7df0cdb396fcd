"""Waits until servers are ready and serve a request; reports phases meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .local_http import http
from .logs import current_phase
from .process import Process, Progress, check_alive

# Sockets need a finite time-out, a start does not. A request without an answer by then is repeated.
LONGEST_REQUEST_S = 86400.0


class NotReadyError(PdRadixError):
    """The start's time is up."""


class Startup:
    """The wait of one start, at most ``timeout_s`` seconds from now.

    ``on_progress`` is called at every step. ``on_wait`` is called every 0.1 s; what it raises ends the wait. ``ended``
    is set when the servers are given up. ``watched``: processes of which none may end meanwhile.
    """

    def __init__(
        self,
        watched: Sequence[Process],
        timeout_s: float,
        log_dir: Path,
        ended: threading.Event,
        on_progress: Callable[[Progress], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._watched, self._timeout_s, self._log_dir, self._ended = watched, timeout_s, log_dir, ended
        self._on_progress, self._on_wait = on_progress, on_wait
        self._began = time.monotonic()

    def report(self, process: Process | None, phase: str) -> None:
        """Report a new phase, of a process or of the whole."""
        if process is not None:
            if process.phase == phase:
                return
            process.phase = phase
        if self._on_progress:
            self._on_progress(Progress(process, phase, time.monotonic() - self._began))

    def ask(self, processes: Sequence[Process]) -> None:
        """Poll each until healthy, in threads: an answer takes a second or more."""
        for process in processes:
            threading.Thread(target=self._ask_until_ready, args=(process,), daemon=True).start()

    def wait_ready(self, processes: Sequence[Process]) -> None:
        """Wait until all polled processes are healthy."""
        while not self.are_ready(processes):
            time.sleep(0.1)

    def are_ready(self, processes: Sequence[Process]) -> bool:
        """Whether all are healthy. Raises at once if one ends or the time is up; reports phases."""
        self._watch(lambda: ", ".join(f"{p.name} is {p.phase}" for p in processes if p.ready_s is None), processes)
        self._report_ready(processes)
        return all(process.ready_s is not None for process in processes)

    def wait_served(self, url: str, tokenizes: bool = True) -> None:
        """Send short requests until one succeeds. tokenizes: send text instead of token ids."""
        body: dict[str, Any] = {"text": "ready"} if tokenizes else {"input_ids": [1, 2, 3, 4]}
        body["sampling_params"] = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            answers.append(http(url + "/generate", body, min(max(1.0, self._left()), LONGEST_REQUEST_S)))

        def trouble() -> str:
            if not answers:
                return "a request through the router got no answer"
            status, content = answers[-1]
            return f"requests through the router fail with HTTP {status}: {content.decode(errors='replace')[:300]}"

        while not answers or answers[-1][0] != 200:
            self.call(ask, trouble)
            if answers[-1][0] in (400, 401, 403, 404, 422):
                raise PdRadixError(f"{trouble()}. Logs are in {self._log_dir}")
            if answers[-1][0] != 200:
                time.sleep(0.2)

    def call(self, work: Callable[[], None], doing: Callable[[], str]) -> None:
        """Run ``work`` in a thread. doing: text for an error if the start ends meanwhile."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            self._watch(doing)
            thread.join(0.1)
        self._watch(doing)

    def _left(self) -> float:
        return self._began + self._timeout_s - time.monotonic()

    def _report_ready(self, processes: Sequence[Process]) -> None:
        for process in processes:
            if process.ready_s is not None:
                self.report(process, f"ready after {process.ready_s:.1f} s")

    def _watch(self, doing: Callable[[], str], starting: Sequence[Process] = ()) -> None:
        """Raise at once if a process ends or the time is up; report phases."""
        if self._on_wait:
            self._on_wait()
        check_alive(self._watched)
        if self._left() <= 0:
            raise NotReadyError(f"not ready after {self._timeout_s:g} s: {doing()}. Logs are in {self._log_dir}")
        for process in starting:
            if process.ready_s is None and process.role != "router":
                phase = current_phase(process.log_path)
                if phase:
                    self.report(process, phase)

    def _ask_until_ready(self, process: Process) -> None:
        # The router answers /health before it has a worker; /readiness needs one of each kind.
        path = "/readiness" if process.role == "router" else "/health"
        while not self._ended.is_set() and process.returncode() is None:
            if http(process.url + path, timeout=25)[0] == 200:
                process.ready_s = time.monotonic() - self._began
                return
            time.sleep(0.2)
