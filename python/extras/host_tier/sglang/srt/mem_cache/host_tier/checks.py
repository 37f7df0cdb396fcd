"""Whether the host has the memory that a host tier asks for, before the model is loaded.

The engine looks when it allocates, after that, and at the machine alone: a container that may have less is ended there.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["check_free", "free_bytes"]

# What the engine leaves to others.
LEFT_BYTES = 10 * 1024**3
CGROUP = Path("/sys/fs/cgroup")
# Which of its groups this process is in.
OWN_GROUPS = Path("/proc/self/cgroup")
# By version of control groups: the controller, the limit, what is used, and the name in memory.stat of what can be had
# back of that.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> tuple[int, str]:
    """Bytes that this process and others beside it can still have, and whose limit that is.

    The least of the machine's, and of its control group's and of those above that.
    """
    found = psutil.virtual_memory().available, "this machine"
    for controller, limit, used, inactive in _VERSIONS:
        for path in _path(own, controller):
            group = cgroup / controller / path
            try:
                most = int((group / limit).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                parts: Mapping[str, str] = dict(line.split() for line in lines)
                left = most - int((group / used).read_text()) + int(parts.get(inactive, 0))
            except (OSError, ValueError):
                # Not this version, or no group that is seen here; or "max", which is no limit.
                continue
            found = min(found, (max(0, left), f"control group /{path}" if path.parts else "this container"))
    return found


def _path(own: Path, controller: str) -> list[PurePosixPath]:
    """The groups of a controller ("": of version 2) that this process is in, from its own one to the root."""
    root = PurePosixPath()
    try:
        groups = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
        path = next(PurePosixPath(name.lstrip("/")) for names, name in groups if controller in names.split(","))
    except (OSError, ValueError, StopIteration):
        return [root]
    # Above what is seen here is nothing to look at.
    return [root] if ".." in path.parts else [path, *path.parents]


def check_free(args: ServerArgs, cgroup: Path = CGROUP) -> None:
    """Raise ValueError where there is less memory than ``--hicache-size`` asks for all ranks of this host.

    What ``--hicache-ratio`` asks for is known when the model has been loaded; the engine looks then.
    """
    # Without DP attention each replica has ranks of its own.
    ranks = args.tp_size * (1 if args.enable_dp_attention else args.dp_size) // args.nnodes
    needed = args.hicache_size * 10**9 * ranks
    free, whose = free_bytes(cgroup)
    if needed > max(0, free - LEFT_BYTES):
        raise ValueError(
            f"--hicache-size {args.hicache_size} takes {needed / 1e9:.1f} GB of host memory for {ranks} "
            f"{'ranks' if ranks > 1 else 'rank'}, and {whose} has {free / 1e9:.1f} GB free, of which "
            f"{LEFT_BYTES / 1e9:.1f} are left to others. Give less, or leave --enable-hierarchical-cache out."
        )
