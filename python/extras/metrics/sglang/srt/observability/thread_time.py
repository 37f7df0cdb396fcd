"""Thread time: excludes waits for a CPU core on a busy host.

So a step that is long by it has waited for something else, such as a peer. The kernel counts core waits in the second
field of /proc/thread-self/schedstat, nanoseconds (https://docs.kernel.org/scheduler/sched-stats.html). Without that
file it is the monotonic clock.

Upstream: none is known.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

__all__ = ["now"]

_SCHEDSTAT = "/proc/thread-self/schedstat"
_thread = threading.local()


def now() -> float:
    """Seconds; only differences within one thread are meaningful. Takes microseconds."""
    at = time.monotonic()
    file = getattr(_thread, "file", None)
    if file is None:
        file = _thread.file = -1
        with contextlib.suppress(OSError):
            file = _thread.file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    if file < 0:
        return at
    return at - int(os.pread(file, 64, 0).split()[1]) / 1e9
