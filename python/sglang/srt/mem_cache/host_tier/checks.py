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
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

__all__ = ["check_free", "check_rank", "draft_part", "free_bytes"]

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

    What ``--hicache-ratio`` asks for is known when the model has been loaded.
    """
    if args.hicache_size:
        draft = draft_part(args)
        size = f"{args.hicache_size}, with KV of the draft beside it," if draft else str(args.hicache_size)
        # Without DP attention each replica has ranks of its own.
        replicas = 1 if args.enable_dp_attention else args.dp_size
        ranks = args.tp_size * replicas // args.nnodes
        _check(args.hicache_size * (1 + draft) * 10**9, f"--hicache-size {size}", ranks, cgroup)


def check_rank(args: ServerArgs, size: float, cgroup: Path = CGROUP) -> None:
    """The same of one rank with ``--hicache-ratio`` alone, which is about to take ``size`` bytes for that.

    Others may have taken theirs by then, or not. So what fits is never refused, and not all that does not fit is.
    """
    if not args.hicache_size:
        _check(size, f"--hicache-ratio {args.hicache_ratio:g}", 1, cgroup)


def _check(size: float, option: str, ranks: int, cgroup: Path) -> None:
    needed = size * ranks
    free, whose = free_bytes(cgroup)
    if needed > max(0, free - LEFT_BYTES):
        raise ValueError(
            f"{option} takes {needed / 1e9:.1f} GB of host memory for {ranks} {'ranks' if ranks > 1 else 'rank'}, and "
            f"{whose} has {free / 1e9:.1f} GB free, of which {LEFT_BYTES / 1e9:.1f} are left to others. Give less, or "
            "leave --enable-hierarchical-cache out."
        )


def draft_part(args: ServerArgs) -> float:
    """KV of a token of the draft model, which is kept at the same slots, over that of the model; 0 without a draft.

    A draft that is part of the model is refused with a host tier.
    """
    path = args.speculative_draft_model_path
    if args.speculative_algorithm is None or path in (None, args.model_path):
        return 0.0
    # Not at the top: the options are made before what it needs.
    from sglang.srt.configs.model_config import ModelConfig

    try:
        revision = args.speculative_draft_model_revision
        draft = ModelConfig.from_server_args(args, model_path=path, model_revision=revision, is_draft_model=True)
    except Exception:
        # The engine says what is wrong with it, when it loads it.
        return 0.0
    tp_size = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
    return _token_size(draft, tp_size) / _token_size(args.get_model_config(), tp_size)


def _token_size(config: ModelConfig, tp_size: int) -> int:
    """Numbers that one rank keeps of a token."""
    if config.attention_arch.name == "MLA":
        return config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    return config.num_hidden_layers * config.get_num_kv_heads(tp_size) * config.head_dim * 2
