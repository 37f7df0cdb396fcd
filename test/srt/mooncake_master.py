"""A mooncake_master of the tests: the real one, on ports of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_pd_radix.tools.cluster import free_ports

HOST = "127.0.0.1"


def missing() -> str:
    """Why there is none, empty where there is."""
    try:
        from mooncake import store  # noqa: F401
    except ImportError as e:
        return f"Mooncake's store cannot be imported: {e}"
    return "" if program().exists() else f"{program()} is not there"


def program() -> Path:
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "mooncake_master"


class Master:
    """One process, which begins anew with nothing when it is started again."""

    def __init__(self, log: Path):
        self._log, self._process = log, None
        self.port, self._metrics_port = free_ports(2)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def kind(self) -> str:
        """As `storage_kinds` tells it apart."""
        return f"mooncake {self.address} {self._metrics_port}"

    def start(self) -> Master:
        command = [str(program()), f"--rpc_address={HOST}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={HOST}", f"--metrics_port={self._metrics_port}"]
        with open(self._log, "ab") as log:
            self._process: Any = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while True:
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text()[-2000:]
            try:
                socket.create_connection((HOST, self.port), 1).close()
                keys(self._metrics_port)
                return self
            except OSError:
                time.sleep(0.05)

    def hang(self) -> None:
        """Returns when all its threads are stopped: until then it may answer once more."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running(folder: Path) -> Iterator[Master]:
    """One that has been started, with its log in ``folder``; skips where Mooncake is not installed."""
    why = missing()
    if why:
        pytest.skip(why)
    master = Master(folder / "master.log").start()
    try:
        yield master
    finally:
        master.stop()


def keys(metrics_port: int) -> list[str]:
    """Names of all objects."""
    with urllib.request.urlopen(f"http://{HOST}:{metrics_port}/get_all_keys", timeout=10) as reply:
        return reply.read().decode().split()
