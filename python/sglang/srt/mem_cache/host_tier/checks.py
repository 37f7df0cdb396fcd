"""Whether the host has the memory that a host tier asks for, before the model is loaded.

The engine looks when it allocates, after that, and at the machine alone: a container that may have less is ended there.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["check_free", "free_bytes"]

# What the engine leaves to others.
LEFT_BYTES = 10 * 1024**3
CGROUP = Path("/sys/fs/cgroup")
# By version of control groups: the limit, what is used, and of that by its name what can be had back.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_bytes(cgroup: Path = CGROUP) -> tuple[int, str]:
    """Bytes that this process and others beside it can still have, and whose limit that is."""
    found = psutil.virtual_memory().available, "this machine"
    for limit, used, stat, inactive in _FILES:
        try:
            most = int((cgroup / limit).read_text())
            parts: Mapping[str, str] = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
            left = most - int((cgroup / used).read_text()) + int(parts.get(inactive, 0))
        except (OSError, ValueError):
            # Not this version; or "max", which is no limit.
            continue
        found = min(found, (max(0, left), "this container"))
    return found


def check_free(args: ServerArgs, cgroup: Path = CGROUP) -> None:
    """Raise ValueError where there is less memory than ``--hicache-size`` asks for all ranks of this host.

    With ``--hicache-ratio`` alone, what is needed is known when the model has been loaded.
    """
    if not args.hicache_size:
        return
    ranks = args.tp_size // args.nnodes
    needed = args.hicache_size * 10**9 * ranks
    free, whose = free_bytes(cgroup)
    if needed > free - LEFT_BYTES:
        raise ValueError(
            f"--hicache-size {args.hicache_size} takes {needed / 1e9:.1f} GB of host memory for {ranks} ranks, and "
            f"{whose} has {free / 1e9:.1f} GB free, of which {LEFT_BYTES / 1e9:.1f} are left to others. Give less, or "
            "leave --enable-hierarchical-cache out."
        )
