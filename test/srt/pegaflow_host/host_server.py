"""A real pegaflow-server on a machine without a GPU: only the CUDA driver under it is a stand-in (cuda_on_host.c).

As a program, with the options of the server, it becomes that server.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import requests

from sglang_pd_radix.tools.cluster import free_ports

HERE = Path(__file__).parent
HOST = "127.0.0.1"
START_S = 30


def missing() -> str | None:
    """What a test of it lacks on this machine, as the reason to skip it; None if nothing."""
    if importlib.util.find_spec("pegaflow") is None:
        return "pegaflow-llm is not installed: pip install 'sglang-pd-radix[pegaflow]'"
    if shutil.which("cc") is None:
        return "no C compiler (cc) to build the stand-in for the CUDA driver with"
    if not _libpython().exists():
        return f"the PegaFlow server needs {_libpython()}, which this Python comes without"
    return None


def _libpython() -> Path:
    return Path(sysconfig.get_config_var("LIBDIR")) / f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def package_path() -> list[str]:
    """Where the client and server are, for a PYTHONPATH; nothing if that is where all packages are."""
    where = str(Path(importlib.util.find_spec("pegaflow").origin).parents[1])
    return [where] if "site-packages" not in where else []


def engine_env() -> dict[str, str]:
    """For engines that are to use it."""
    return {"PYTHONPATH": os.pathsep.join([str(HERE / "engine"), *filter(None, [os.environ.get("PYTHONPATH")])])}


def build(directory: Path) -> Path:
    """The stand-in under all names by which the server asks for the driver; where they are."""
    libraries = directory / "cuda"
    libraries.mkdir(exist_ok=True)
    first = libraries / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(first), str(HERE / "cuda_on_host.c")]
    subprocess.run(command, check=True, timeout=60)
    for name in ("libcuda.so", "libcudart.so", "libcudart.so.12"):
        shutil.copy(first, libraries / name)
    return libraries


def binary() -> str:
    return str(Path(importlib.util.find_spec("pegaflow").origin).parent / "pegaflow-server-py")


def server_env(libraries: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), sysconfig.get_config_var("LIBDIR")]),
        "PYTHONPATH": os.pathsep.join([str(HERE / "server"), str(HERE)]),
        "PYTHONHOME": sys.base_prefix,
    }


class HostServer:
    """One server; ``start`` after ``kill`` brings it back, empty, where it was."""

    def __init__(self, directory: Path, pool: str = "256mb", copy_us: int = 0) -> None:
        self.directory, self.pool, self.copy_us = directory, pool, copy_us
        port, http_port = free_ports(2)
        self.endpoint, self.http = f"{HOST}:{port}", f"{HOST}:{http_port}"
        self.log = directory / "pegaflow.log"
        self.process: subprocess.Popen | None = None
        self.libraries = build(directory)
        # While it is there, no copy of the server's goes on.
        self._hold = directory / "hold"

    def start(self) -> HostServer:
        command = [binary(), "--addr", self.endpoint, "--http-addr", self.http, "--devices", "0"]
        command += ["--pool-size", self.pool, "--enable-prometheus"]
        env = {**server_env(self.libraries), "CUDA_ON_HOST_COPY_US": str(self.copy_us)}
        env["CUDA_ON_HOST_HOLD"] = str(self._hold)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            try:
                requests.get(f"http://{self.http}/health", timeout=1)
                return self
            except requests.ConnectionError:
                assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def hold(self) -> None:
        """Have copies wait until `let_go`."""
        self._hold.touch()

    def holds(self) -> bool:
        """Whether a copy waits, or has waited."""
        return self._hold.with_suffix(".waits").exists()

    def let_go(self) -> None:
        self._hold.unlink()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    # ---- what it says of itself ----

    def instances(self) -> list[str]:
        return requests.get(f"http://{self.http}/instances", timeout=5).json()["instances"]

    def metric(self, name: str) -> float:
        """The sum of a counter or gauge over its labels."""
        lines = requests.get(f"http://{self.http}/metrics", timeout=5).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def mappings(self) -> int:
        """KV buffers of engines that it has mapped."""
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("memfd:pegaflow-kv")

    def forget(self) -> None:
        """Have it let all pages go that no lease holds."""
        requests.post(f"http://{self.http}/cache/memory/cleanup", timeout=30).raise_for_status()


if __name__ == "__main__":
    # Its files go with the machine's temporary ones: a program that has become another cannot tidy up.
    made = build(Path(tempfile.mkdtemp(prefix="pegaflow-host-")))
    os.execve(binary(), [binary(), *sys.argv[1:]], server_env(made))
