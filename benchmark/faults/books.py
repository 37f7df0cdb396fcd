"""What a worker holds, by its own books (``kv_pool`` of /server_info) and by those of the kernel.

Both are plain data; `judge` says what of it is wrong.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.cluster import Process
from sglang_pd_radix.tools.workers import idle_pools, server_info, told_pools

# State of TCP sockets in /proc/PID/net/tcp that a process only leaves by closing them.
_CLOSE_WAIT = "08"


@dataclass
class Books:
    """Of one worker. pools: one entry for each rank. The rest are sums over the processes of its group.

    close_wait: sockets whose peer has closed them and that are still open here.
    """

    name: str
    pid: int
    pools: list[dict[str, Any]] = field(default_factory=list)
    threads: int = 0
    rss_kib: int = 0
    descriptors: int = 0
    close_wait: int = 0

    def document(self) -> dict[str, Any]:
        return asdict(self)


def of_process(process: Process) -> Books:
    """What the kernel says of a server's process group."""
    books = Books(process.name, process.pid)
    for pid in process_group.members(process.pid):
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(pid)
            books.threads += one.num_threads()
            books.rss_kib += one.memory_info().rss // 1024
            books.descriptors += one.num_fds()
        books.close_wait += _close_wait(pid)
    return books


def _close_wait(pid: int) -> int:
    """Sockets of a process whose peer has closed them; psutil looks into this network namespace alone."""
    waiting, found = set(), 0
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _CLOSE_WAIT:
                    waiting.add(f"socket:[{columns[9]}]")
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(entry.path) in waiting
    return found


def of_idle_worker(process: Process, seconds: float) -> Books:
    """The same, once all its ranks are idle, or as they are after ``seconds``.

    What it says is what it was found idle by: the router's next health check is a request that holds memory.
    """
    found = idle_pools(process.url, seconds)
    books = of_process(process)
    books.pools = found
    return books


def pools(url: str) -> list[dict[str, Any]]:
    """``kv_pool`` of each DP rank, in their order. Raises PdRadixError."""
    return told_pools(server_info(url))
