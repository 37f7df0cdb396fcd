"""A command in a process group of its own, which ends at a given moment together with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .. import process_group

#: Seconds that a command has to write what it has found once it is asked to end; a cluster takes about ten to go.
GRACE_S = 40.0
_POLL_S = 0.1
_LOOK_S = 1.0
# After its end: what it started has a watchdog that ends it, which needs a moment.
_GONE_S = 4.0


@dataclass(frozen=True)
class Ended:
    """code: exit status, negative for a signal. stopped: why it was ended from here, "" where it ended by itself.

    overran: that was because its time was over.
    """

    code: int
    seconds: float
    stopped: str = ""
    overran: bool = False


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
    asked_to_end: Callable[[], bool] = lambda: False,
    grace_s: float = GRACE_S,
) -> Ended:
    """Run ``command`` for at most ``seconds``, its output in ``log``. Nothing of it is left when this returns.

    One that takes longer is sent SIGINT, which has a benchmark write what is complete, and killed ``grace_s`` later. It
    is killed as well where this process is: a watchdog sees to that.
    """
    began = time.monotonic()
    with log.open("ab") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_heeds_interrupt,
        )
    family = _Family(popen.pid)
    with _watchdog(popen.pid):
        stopped, overran = "", False
        try:
            while popen.poll() is None and not stopped:
                family.look()
                if asked_to_end():
                    stopped = "interrupted"
                elif time.monotonic() - began > seconds:
                    overran, stopped = True, f"stopped after {seconds:.0f} s, its share of the time"
                time.sleep(_POLL_S)
            if stopped:
                _interrupt(popen, family, grace_s)
        finally:
            family.end()
            popen.wait()
    return Ended(popen.returncode, time.monotonic() - began, stopped, overran)


def _heeds_interrupt() -> None:
    """In the child: a shell that starts this process in the background has it ignore SIGINT, which is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(popen: subprocess.Popen[bytes], family: _Family, grace_s: float) -> None:
    popen.send_signal(signal.SIGINT)
    deadline = time.monotonic() + grace_s
    while popen.poll() is None and time.monotonic() < deadline:
        family.look()
        time.sleep(_POLL_S)


class _Family:
    """The process group of a command and whatever it has started since, in whatever groups."""

    def __init__(self, pid: int) -> None:
        self._group, self._seen = pid, set[psutil.Process]()
        self._looked = 0.0

    def look(self) -> None:
        """Note who there is. Those whose parent has ended are nobody's children any more, so that has to be often."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(psutil.Error):
            self._seen.update(psutil.Process(self._group).children(recursive=True))

    def end(self) -> None:
        self._looked = 0.0
        self.look()
        process_group.kill(self._group)
        # Watchdogs end their servers now; what is left then has none.
        _, left = psutil.wait_procs(list(self._seen), timeout=_GONE_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_GONE_S)


@contextlib.contextmanager
def _watchdog(group: int) -> Iterator[None]:
    """Kills ``group`` if this process is gone before it is told that the group is."""
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", process_group.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert popen.stdin
    popen.stdin.write(f"+ {group}\n".encode())
    popen.stdin.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            popen.stdin.write(f"- {group}\n".encode())
            popen.stdin.close()
        popen.wait(timeout=10)
