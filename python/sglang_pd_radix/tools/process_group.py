"""Ends process groups, and is the watchdog that does so after their owner's end.

As a program (``python -I -S process_group.py``) it reads lines "+ PID" and "- PID", which add and remove groups, and
ends the remaining ones when its input closes. It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

# Removes shared memory and semaphores of ended Python processes. If killed, it leaves them.
_TRACKER = b"multiprocessing.resource_tracker"


# Signals that end a program by default.
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def members(group: int) -> dict[int, bytes]:
    """Live processes (not zombies) of ``group``: pid to command line."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{entry.name}/stat", encoding="utf-8", errors="replace") as stat:
                state, _, pgrp = stat.read().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                with open(f"/proc/{entry.name}/cmdline", "rb") as cmdline:
                    found[int(entry.name)] = cmdline.read()
    return found


def kill(group: int, tracker_s: float = 1.0) -> None:
    """Kill all processes of ``group``; resource trackers come last and get ``tracker_s`` seconds to clean up."""
    deadline = time.monotonic() + tracker_s
    while True:
        live = members(group)
        others = [pid for pid, command in live.items() if _TRACKER not in command]
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not live:
            return
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return
        time.sleep(0.02)


def wait_gone(group: int, seconds: float) -> None:
    """Wait until ``group`` has no process, at most ``seconds``. Killed ones take a moment."""
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def on_end(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call ``handler`` on the signals that end this process."""
    for signum in ends():
        signal.signal(signum, handler)


def ends() -> list[signal.Signals]:
    """Those of `ENDS` that this process obeys."""
    # `nohup` ignores SIGHUP on request; an ignored SIGINT only means a shell's background process.
    return [one for one in ENDS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


@contextlib.contextmanager
def handled(signums: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Use ``handler`` for these signals in the block; restores the old handlers."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, was in before.items():
            signal.signal(signum, was)


@contextlib.contextmanager
def ends_held_back() -> Iterator[None]:
    """Delay the signals that end this process, and their handlers, until the block ends.

    For what must not be interrupted. It uses handlers, since child processes would inherit a mask; main thread only.
    Ignored signals stay ignored.
    """
    came: list[int] = []
    held: list[int] = []
    if threading.current_thread() is threading.main_thread():
        held = [one for one in ENDS if signal.getsignal(one) not in (None, signal.SIG_IGN)]
    try:
        with handled(held, lambda one, frame: came.append(one)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def main() -> None:
    """Watch: note the groups from stdin, and kill the remaining ones when it closes."""
    # systemd sends them to all processes of a unit: the owner should first end the groups properly.
    for signum in ENDS:
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        sign, pid = line.split()
        (groups.add if sign == "+" else groups.discard)(int(pid))
    for group in groups:
        kill(group)


if __name__ == "__main__":
    main()
