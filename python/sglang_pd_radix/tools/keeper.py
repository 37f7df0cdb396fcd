"""Handles the end of a process in a running deployment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from sglang_pd_radix.errors import PdRadixError

from .cluster import Cluster, Process, describe_exit
from .cluster.startup import Startup
from .drain import leave
from .operate.reading import gateway_workers

# Restarts of a process, and seconds of service after which the count starts again.
RESTARTS, STEADY_S = 3, 60.0
# Seconds for the router to remove a worker.
LEAVE_S = 10.0


class Keeper:
    """Keeps the processes of a running deployment alive.

    restarts: whether to restart crashed ones. say: prints a line.
    """

    def __init__(self, cluster: Cluster, restarts: bool, say: Callable[[str], None]) -> None:
        self._cluster, self._restarts, self._say = cluster, restarts, say
        # By name: number of restarts, and time of the last readiness.
        self._tries: dict[str, tuple[int, float]] = {}
        self._starting: dict[str, Startup] = {}

    def attend(self) -> bool:
        """Handle an ended process. Returns whether there was one.

        Raises PdRadixError if the deployment ends with it.
        """
        process = self._cluster.dead()
        if process is None:
            self._look_at_starting()
            return False
        said = f"{process.name} {describe_exit(process.returncode() or 0)}"
        drained = process.is_worker and self._is_drained(process)
        if drained or (process.is_worker and process.returncode() == 0):
            self._cluster.leave_out(process.name)
            self._starting.pop(process.name, None)
            self._say(f"{said}; the others go on")
            if not drained:
                self._take_out(process)
        elif self._restarts:
            self._start_again(process)
        else:
            raise PdRadixError(process.obituary())
        return True

    def _start_again(self, process: Process) -> None:
        tries, since = self._tries.get(process.name, (0, 0.0))
        if not self._starting.pop(process.name, None) and time.monotonic() - since >= STEADY_S:
            tries = 0
        if tries == RESTARTS:
            raise PdRadixError(f"started again {RESTARTS} times, {process.obituary()}")
        reason = process.obituary().partition("\n")[0]
        kept = process.log_path.with_suffix(f".{tries + 1}.log")
        with contextlib.suppress(OSError):
            process.log_path.replace(kept)
        self._say(f"{reason}; started again ({tries + 1} of {RESTARTS}). Its log until now is {kept}")
        self._cluster.kill(process.name)
        self._starting[process.name] = self._cluster.start_again(process.name)
        self._tries[process.name] = tries + 1, 0.0

    def _look_at_starting(self) -> None:
        try:
            for name, startup in list(self._starting.items()):
                if self._cluster.has_started(name, startup):
                    del self._starting[name]
                    self._tries[name] = self._tries[name][0], time.monotonic()
        except PdRadixError:
            # Further ended processes are handled at the next look.
            if self._cluster.dead() is None:
                raise

    def _take_out(self, process: Process) -> None:
        """Have the router remove it: otherwise requests for its prefixes would go to it for ever."""
        try:
            leave(self._cluster.router_url, process.url, time.monotonic() + LEAVE_S, lambda _: None)
        except PdRadixError as error:
            self._say(f"{error}; requests that the router sends to it fail")

    def _is_drained(self, process: Process) -> bool:
        """Whether the router has removed it on request."""
        try:
            known = gateway_workers(self._cluster.router_url)
        except PdRadixError:
            return False
        return process.url not in {worker["url"] for worker in known}
