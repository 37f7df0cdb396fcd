"""Hardware, driver and versions: what a reader of the report cannot ask this machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from sglang_pd_radix.tools.cluster import named_gateway

from .host import Host, ask_driver

# Whose release may matter; those that are not installed are left out.
_PACKAGES = (
    *("sglang", "sglang-pd-radix", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python"),
    *("transformers", "numpy", "nixl", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine"),
    *("mooncake-transfer-engine-non-cuda", "smg", "sglang-router", "pegaflow-llm"),
)
_GPU = ("index", "name", "driver_version", "memory.total", "power.limit", "pcie.link.gen.max", "pcie.link.width.max")


def machine(host: Host) -> dict[str, str]:
    """The machine, by what it is called."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores to use of {os.cpu_count()}",
        "memory": f"{memory:.0f} GiB",
    }
    for index, *told in ask_driver(*_GPU):
        values = dict(zip(_GPU[1:], told, strict=False))
        found[f"GPU {index}"] = ", ".join(
            [
                values.get("name", ""),
                f"{values.get('memory.total')} MiB",
                f"{values.get('power.limit')} W",
                f"PCIe {values.get('pcie.link.gen.max')} x{values.get('pcie.link.width.max')}",
                f"driver {values.get('driver_version')}",
            ]
        )
    if len(host.gpus) > 1:
        found["between GPUs"] = _output(["nvidia-smi", "topo", "-m"])
    found["engines run on"] = "the CPU, so all is done in small" if host.small else "the GPU"
    return {name: value for name, value in found.items() if value}


def versions(host: Host, router: str | None) -> dict[str, str]:
    """Releases of what has a part in it."""
    found = {"Python": platform.python_version(), "router": named_gateway(router).version}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if host.checkout is not None:
        commit = _output(["git", "-C", str(host.checkout), "describe", "--always", "--dirty"])
        found["checkout"] = commit or "not a git repository"
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _output(command: list[str]) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
