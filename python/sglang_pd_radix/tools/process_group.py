"""End whole process groups, and be the watchdog that does so when their owner is gone.

Run as a program (``python -I -S process_group.py``) it reads "+ PID" and "- PID" lines, which say what groups there
are, and ends those that are left when its input closes. It needs the standard library only, and no package around it.
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

# Removes a Python program's shared memory and semaphores once its processes are gone. Killed, it leaves them behind.
_TRACKER = b"multiprocessing.resource_tracker"


# What ends a program that does not say otherwise.
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kernel_stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on (the third of the fields of proc(5)); empty if none."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    return []


def start_time(pid: int) -> str:
    """When a process started, in the kernel's own count, which tells it from an earlier one of that number; or ""."""
    return next(iter(kernel_stat(pid)[19:]), "")


def members(group: int) -> dict[int, bytes]:
    """Live processes (not zombies) of ``group``: pid to command line."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            state, _, pgrp = kernel_stat(int(entry.name))[:3]
            if int(pgrp) == group and state not in "ZX":
                with open(f"/proc/{entry.name}/cmdline", "rb") as cmdline:
                    found[int(entry.name)] = cmdline.read()
    return found


def kill(group: int, tracker_s: float = 1.0) -> None:
    """Kill every process of ``group``, its resource trackers last: they get ``tracker_s`` seconds to clean up."""
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
    """Wait until no process of ``group`` is left, at most ``seconds``. A killed one still needs time to end."""
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def on_end(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have ``handler`` called by the signals that end this process."""
    for signum in ends():
        signal.signal(signum, handler)


def ends() -> list[signal.Signals]:
    """Those of `ENDS` that this process is to obey."""
    # `nohup` asks for that; that SIGINT is ignored is only a shell's way with what it starts in the background.
    return [one for one in ENDS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


@contextlib.contextmanager
def handled(signums: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have ``handler`` called by these signals until the block is left, and what was called before again after it."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, was in before.items():
            signal.signal(signum, was)


@contextlib.contextmanager
def ends_held_back() -> Iterator[None]:
    """Hold back the signals that end this process, and what else their handlers do, until the block is left.

    For what must not be cut in two. By handlers and not by a mask, which a process that is started would inherit; only
    the main thread has them. What is ignored stays so.
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
    """Watch: remember the groups named on the standard input, and kill them when it closes."""
    # systemd sends them to all processes of a unit: who writes to that input is to end the groups in peace first.
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
