"""Whether this host can run Mooncake's transfer engine, and exactly what it lacks where it cannot.

Run as a program (``python -m sglang_pd_radix.supplied.mooncake_host --install``, which ``make setup`` does) it
installs what is missing, as far as its user may.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_pd_radix.supplied import cpu_host

# Libraries that the wheels of Mooncake's engine expect of the system, and their packages in Debian and Ubuntu.
DEBIAN_PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
PACKAGE = "mooncake-transfer-engine"
CPU_PACKAGE = "mooncake-transfer-engine-non-cuda"


def installed() -> bool:
    """Whether the Python package of the engine is there; it may still not load."""
    return importlib.util.find_spec("mooncake") is not None


def missing_libraries(error: str) -> list[str]:
    """The system libraries that the engine's own library needs and does not find, by their file names.

    error: what the dynamic linker said, which names the first of them; ``ldd`` names them all.
    """
    missing = re.findall(r"^(\S+\.so\S*): cannot open shared object file", error)
    spec = importlib.util.find_spec("mooncake")
    folders = list(spec.submodule_search_locations or []) if spec else []
    libraries = [str(path) for folder in folders for path in Path(folder).glob("engine*.so")]
    if libraries and shutil.which("ldd"):
        listing = subprocess.run(["ldd", *libraries], capture_output=True, text=True, timeout=30).stdout
        missing += re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)
    return sorted(set(missing))


def trouble(cpu: bool) -> tuple[str, str] | None:
    """What keeps Mooncake from loading and the way out of it; None if nothing does.

    cpu: whether this is a host without CUDA, for which there is a package of its own. Loads the engine's library into
    this process.
    """
    package = CPU_PACKAGE if cpu else PACKAGE
    if not installed():
        return "the Python package of Mooncake's transfer engine is not installed", f"pip install {package}"
    try:
        if not cpu:
            importlib.import_module("torch")  # brings the CUDA runtime that the library looks for
        importlib.import_module("mooncake.engine")
        return None
    except ImportError as error:
        cause = str(error)
    missing = missing_libraries(cause)
    if any(name.startswith("libcud") for name in missing) and cpu:
        way_out = f"pip uninstall {PACKAGE}, then pip install {CPU_PACKAGE}"
        return f"its CUDA build is installed, and this host has no CUDA ({', '.join(missing)})", way_out
    if missing:
        packages = " ".join(DEBIAN_PACKAGES.get(name, f"<package of {name}>") for name in missing)
        return f"it lacks system libraries: {', '.join(missing)}", f"on Debian or Ubuntu: apt-get install {packages}"
    return f"it does not load: {cause}", f"pip install --force-reinstall {package}"


def check(cpu: bool) -> None:
    """Raise ImportError, with the cause and the way out, where Mooncake cannot be loaded."""
    found = trouble(cpu)
    if found:
        raise ImportError(
            f"--disaggregation-transfer-backend mooncake (the default) cannot be used here: {found[0]}. "
            f"Way out: {found[1]}; or give --disaggregation-transfer-backend nixl to prefill and decode."
        )


RDMA_DEVICES = Path("/sys/class/infiniband")


def transport(devices: str | None = None) -> tuple[str, str]:
    """What Mooncake transfers over on this host, as far as can be told from outside, and how to change that.

    devices: of --disaggregation-ib-device. Where there is no RDMA device, Mooncake takes TCP without a word.
    """
    if os.environ.get("MC_FORCE_TCP"):
        return "TCP (MC_FORCE_TCP is set)", "unset MC_FORCE_TCP where there are RDMA devices"
    try:
        found = sorted(path.name for path in RDMA_DEVICES.iterdir())
    except OSError:
        found = []
    if not found:
        return (
            "TCP (no RDMA device here)",
            "for RDMA install the devices' driver; in a container pass /dev/infiniband in",
        )
    use = f"RDMA ({devices or ', '.join(found)})"
    return use, f"name working devices of {', '.join(found)} with --disaggregation-ib-device, or set MC_FORCE_TCP=1"


# ---- installing ----

# Seconds for one call of pip or apt-get.
INSTALL_TIMEOUT = 600


def install(cpu: bool, pip_options: Sequence[str] = ()) -> tuple[str, str] | None:
    """Install the package with pip and, as root on Debian or Ubuntu, the system libraries it lacks.

    pip_options: put before the package's name, such as ``-c constraints.txt``. Returns what is still wrong, as
    `trouble` does; what failed is for the caller to show, and Mooncake is left out then.
    """
    if not installed():
        _run([sys.executable, "-m", "pip", "install", *pip_options, CPU_PACKAGE if cpu else PACKAGE])
        importlib.invalidate_caches()
    packages = [DEBIAN_PACKAGES[name] for name in missing_libraries("") if name in DEBIAN_PACKAGES]
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        # Wait for the lock of another apt-get rather than fail; do not wait long for a network that is not there.
        patience = ["DPkg::Lock::Timeout=120", "Acquire::http::Timeout=20", "Acquire::Retries=1"]
        apt_get = ["apt-get", "-q", *(word for option in patience for word in ("-o", option))]
        if _run([*apt_get, "update"]):
            _run([*apt_get, "install", "-y", "--no-install-recommends", *packages])
    return trouble(cpu)


def _run(command: list[str]) -> bool:
    print("+", " ".join(command), flush=True)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(command, env=environment, timeout=INSTALL_TIMEOUT).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return False


def main(args: Sequence[str] | None = None) -> int:
    """Say whether Mooncake can be used here; with ``--install``, try to make it so. Returns 0 if it can, else 1."""
    parser = argparse.ArgumentParser(description="Whether Mooncake's transfer engine can be used on this host.")
    parser.add_argument("--install", action="store_true", help="install what is missing")
    parser.add_argument("--constraints", metavar="FILE", help="versions for pip, as its option -c")
    options = parser.parse_args(args)
    cpu = cpu_host.active()
    pip_options = ["-c", options.constraints] if options.constraints else []
    found = install(cpu, pip_options) if options.install else trouble(cpu)
    if found:
        print(f"Mooncake cannot be used here: {found[0]}. Way out: {found[1]}.", file=sys.stderr)
        return 1
    print("Mooncake can be used here.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
