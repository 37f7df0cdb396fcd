"""Checks that the host has the memory for HiCache L2 before the model is loaded.

The engine checks later, on allocation, and against the machine only: in a container with less memory it is killed.

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

# The engine's own reserve for other processes.
LEFT_BYTES = 10 * 1024**3
CGROUP = Path("/sys/fs/cgroup")
# The control groups of this process.
OWN_GROUPS = Path("/proc/self/cgroup")
# By version of control groups: controller, limit, usage, and the field of memory.stat for reclaimable memory.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> tuple[int, str]:
    """Free bytes for this process and others, and the name of the limit.

    The minimum over the machine, the control group and its parents.
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
                # Another version, a group that is not visible, or "max" (no limit).
                continue
            found = min(found, (max(0, left), f"control group /{path}" if path.parts else "this container"))
    return found


def _path(own: Path, controller: str) -> list[PurePosixPath]:
    """Groups of a controller ("": version 2) that contain this process, from its own to the root."""
    root = PurePosixPath()
    try:
        groups = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
        path = next(PurePosixPath(name.lstrip("/")) for names, name in groups if controller in names.split(","))
    except (OSError, ValueError, StopIteration):
        return [root]
    # Parents outside this namespace are not visible.
    return [root] if ".." in path.parts else [path, *path.parents]


def check_free(args: ServerArgs, cgroup: Path = CGROUP) -> None:
    """Raise ValueError if less memory is free than ``--hicache-size`` needs for all ranks of this host.

    The need of ``--hicache-ratio`` is known only after the model is loaded; the engine checks it then.
    """
    # Without DP attention each replica has its own ranks.
    ranks = args.tp_size * (1 if args.enable_dp_attention else args.dp_size) // args.nnodes
    needed = args.hicache_size * 10**9 * ranks
    free, whose = free_bytes(cgroup)
    if needed > max(0, free - LEFT_BYTES):
        raise ValueError(
            f"--hicache-size {args.hicache_size} takes {needed / 1e9:.1f} GB of host memory for {ranks} "
            f"{'ranks' if ranks > 1 else 'rank'}, and {whose} has {free / 1e9:.1f} GB free, minus "
            f"{LEFT_BYTES / 1e9:.1f} GB reserved for other processes. Reduce it, or omit --enable-hierarchical-cache."
        )
