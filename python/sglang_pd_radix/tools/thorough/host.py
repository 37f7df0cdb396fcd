"""What this machine has, as far as parts depend on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.tools.doctor import Check

#: MiB of a GPU on which all workers of a part start together: their pools are small and of a size that is told.
LARGE_GPU = 40_000
_TIMEOUT_S = 20


@dataclass(frozen=True)
class Gpu:
    """index: by which CUDA_VISIBLE_DEVICES names it. memory: MiB."""

    index: str
    name: str
    memory: int


@dataclass(frozen=True)
class Host:
    """small: engines run on the CPU, so everything is done in small. checkout: this package's, None where it is
    installed without one. mooncake: why nothing can be transferred over it, "" if it can."""

    small: bool
    gpus: tuple[Gpu, ...] = ()
    checkout: Path | None = None
    has_pytest: bool = False
    mooncake: str = ""

    @property
    def large(self) -> bool:
        return bool(self.gpus) and min(gpu.memory for gpu in self.gpus) >= LARGE_GPU


def look(checks: Sequence[Check]) -> Host:
    """At this machine. checks: what `pd-radix doctor` says of it."""
    small = bool(cpu_host.active())
    return Host(
        small,
        () if small else visible_gpus(ask_driver("index", "name", "memory.total"), os.environ),
        checkout(Path(__file__)),
        importlib.util.find_spec("pytest") is not None,
        _trouble("mooncake", checks),
    )


def _trouble(name: str, checks: Sequence[Check]) -> str:
    """Why an optional library cannot be used, "" if it can: of those that can, `doctor` says that they load."""
    found = next((check for check in checks if check.name == name), None)
    if found is None or found.detail.startswith("loads"):
        return ""
    return f"{found.detail}; {found.way_out}" if found.way_out else found.detail


def checkout(module: Path) -> Path | None:
    """The checkout in which the file ``module`` of this package lies, if it does."""
    root = module.resolve().parents[4]
    return root if (root / "test" / "srt" / "unit").is_dir() and (root / "benchmark" / "chaos.py").is_file() else None


def ask_driver(*fields: str) -> list[list[str]]:
    """These fields of each GPU, as nvidia-smi has them; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if told.returncode:
        return []
    return [[field.strip() for field in line.split(",")] for line in told.stdout.splitlines() if line.strip()]


def visible_gpus(rows: list[list[str]], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a worker would see, in its order. rows: index, name and memory of each."""
    found = [Gpu(row[0], row[1], int(row[2]) if row[2].isdigit() else 0) for row in rows if len(row) == 3]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    named = {gpu.index: gpu for gpu in found}
    chosen = [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    # By UUID it is one of those that nvidia-smi lists; which one does not matter here.
    return tuple(named.get(device) or Gpu(device, found[0].name, found[0].memory) for device in chosen if found)
