"""Hardware, driver and versions: what a reader of the report cannot ask this machine."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import sglang_pd_radix
from sglang_pd_radix.patching import loader
from sglang_pd_radix.tools.cluster import named_gateway

from .host import Host, ask_driver

# Whose release may matter; those that are not installed are left out.
_PACKAGES = (
    *("sglang", "sglang-pd-radix", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python"),
    *("transformers", "numpy", "nixl", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine"),
    *("mooncake-transfer-engine-non-cuda", "smg", "sglang-router", "pegaflow-llm"),
)
# By which an engine, or what it transfers over, is set up.
_VARIABLES = ("SGLANG_", "SGL_", "CUDA_VISIBLE_DEVICES", "MC_", "UCX_", "NIXL_", "NCCL_")
_INSTALLED = Path(sglang_pd_radix.__file__).parent
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
    engine = loader.engine_root()
    if engine is not None:
        # A file of it that was edited has no other version.
        files = sorted(file for file in engine.rglob("*.py") if file.is_file())
        found["files of the engine"] = digest(
            word for file in files for word in (str(file.relative_to(engine)), _digest_of_file(file))
        )
    if host.checkout is not None:
        commit = _output(["git", "-C", str(host.checkout), "describe", "--always", "--dirty"])
        found["checkout"] = commit or "not a git repository"
        changes = _changes(host.checkout)
        if changes:
            found["checkout"] += f" (changes {changes})"
    else:
        # Two builds of one release have the same number. In an editable install the patch tree is beside the package.
        files = sorted({*_INSTALLED.rglob("*.py"), *(loader.patch_root() / "sglang").rglob("*.py")})
        found["files of the package"] = digest(word for path in files for word in (path.name, _digest_of_file(path)))
    return found


def _changes(checkout: Path) -> str:
    """A digest of what ``checkout`` has that is not committed, "" if all is.

    Of files that git does not know, those of Python alone: a report, and what parts leave behind, may be among them.
    """
    git = ["git", "-C", str(checkout)]
    unknown = _output([*git, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py"]).split("\0")
    files = [(name, _digest_of_file(checkout / name)) for name in sorted(unknown) if name]
    known = _output([*git, "diff", "HEAD", "--binary"])
    return digest([known, *(word for file in files for word in file)]) if known or files else ""


def environment(variables: Mapping[str, str]) -> str:
    """A digest of those of ``variables`` that set up an engine; their values may be secrets, and are not told."""
    chosen = {name: value for name, value in variables.items() if name.startswith(_VARIABLES)}
    return digest(word for name in sorted(chosen) for word in (name, chosen[name])) if chosen else "none"


def model(path: str | None) -> str:
    """A digest of a model's directory: its config, and the name, size and time of each file.

    To read all weights takes minutes. Of a hosted model, or a made one, there is no directory to look at: "none".
    """
    directory = Path(path or "").expanduser()
    if not path or not directory.is_dir():
        return "none"
    words = [_digest_of_file(directory / "config.json")]
    for file in sorted(directory.rglob("*")):
        with contextlib.suppress(OSError):
            if file.is_file():
                told = file.stat()
                words += [str(file.relative_to(directory)), str(told.st_size), str(told.st_mtime_ns)]
    return digest(words)


def digest(words: Iterable[str]) -> str:
    """Of ``words`` in their order."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _output(command: list[str]) -> str:
    try:
        # A name, or a line of a file, need not be UTF-8.
        told = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
