"""What a worker holds, by its own books (``kv_pool`` of /get_server_info) and by those of the kernel (/proc).

Both are plain data; `judge` says what of it is wrong.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.cluster import Process, local_session
from sglang_pd_radix.tools.workers import told_pools

# States of TCP sockets in /proc/PID/net/tcp that a process only leaves by closing them.
_CLOSE_WAIT = "08"


@dataclass
class Books:
    """Of one worker. pools: one entry for each rank. The rest are sums over the processes of its group.

    fds: open descriptors by kind. close_wait: sockets whose peer has closed them and that are still open here.
    """

    name: str
    pid: int
    pools: list[dict[str, Any]] = field(default_factory=list)
    threads: int = 0
    rss_kib: int = 0
    fds: dict[str, int] = field(default_factory=dict)
    close_wait: int = 0

    @property
    def descriptors(self) -> int:
        return sum(self.fds.values())

    def document(self) -> dict[str, Any]:
        return asdict(self)


def of_process(process: Process) -> Books:
    """What the kernel says of a server's process group."""
    books = Books(process.name, process.pid)
    kinds: collections.Counter[str] = collections.Counter()
    for pid in process_group.members(process.pid):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "Threads":
                    books.threads += int(value)
                elif name == "VmRSS":
                    books.rss_kib += int(value.split()[0])
        waiting = _close_wait_inodes(pid)
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(entry.path)
                    kinds[_kind(link)] += 1
                    books.close_wait += link in waiting
    books.fds = dict(sorted(kinds.items()))
    return books


def of_idle_worker(process: Process, seconds: float) -> Books:
    """The same, once all its ranks are idle, or as they are after ``seconds``.

    What it says is what it was found idle by: the router's next health check is a request that holds memory.
    """
    found = wait_idle(process.url, seconds)
    books = of_process(process)
    books.pools = found
    return books


def pools(url: str) -> list[dict[str, Any]]:
    """``kv_pool`` of each DP rank, in their order. Raises PdRadixError."""
    try:
        with local_session() as session:
            return told_pools(session.get(url + "/get_server_info", timeout=30).json())
    except (OSError, ValueError, KeyError) as error:
        raise PdRadixError(f"{url} does not say what it holds: {error}") from None


def wait_idle(url: str, seconds: float) -> list[dict[str, Any]]:
    """Its pools once all ranks are idle, or as they are after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = pools(url)
        if all(pool["idle"] for pool in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _kind(link: str) -> str:
    for prefix in ("socket:", "pipe:", "anon_inode:"):
        if link.startswith(prefix):
            return prefix[:-1]
    return "file"


def _close_wait_inodes(pid: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _CLOSE_WAIT:
                    found.add(f"socket:[{columns[9]}]")
    return found
