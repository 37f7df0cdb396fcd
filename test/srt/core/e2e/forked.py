"""Workers that are forked from a process that has imported the engine with their environment.

That takes 11 seconds of a core, for each worker and each process that one starts. For hosts without a GPU: CUDA does
not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from typing import Any

MODULE = "sglang.launch_server"
IMPORTED = ["entrypoints.http_server", "managers.detokenizer_manager", "models.registry"]


class Parent:
    """The process that forks workers of one environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self.lock = threading.Lock()
        self.here, there = socket.socketpair()
        with there:
            command = [sys.executable, __file__, str(there.fileno())]
            options = {"stdin": subprocess.DEVNULL, "pass_fds": [there.fileno()], "start_new_session": True}
            self.process = subprocess.Popen(command, env=env, **options)

    def ask(self, question: Any, *files: int) -> Any:
        """question: a worker's arguments, the answer is its process; or its process, the answer is its exit status."""
        with self.lock:
            socket.send_fds(self.here, [json.dumps(question).encode()], files)
            return json.loads(self.here.recv(1 << 10))


class Worker:
    """As much of a `subprocess.Popen` as a cluster needs."""

    def __init__(self, parent: Parent, arguments: list[str], log: int) -> None:
        self.parent, self.pid, self.returncode = parent, parent.ask(arguments, log), None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(MODULE, timeout)
            time.sleep(0.02)

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Parents(dict):
    """By environment. Stands for the module `subprocess` in `tools.cluster.process`."""

    DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def Popen(self, command: list[str], **options: Any) -> Any:
        # PegaFlow's client ends a forked rank by SIGSEGV.
        if command[:3] != [sys.executable, "-m", MODULE] or "--enable-pegaflow" in command:
            return subprocess.Popen(command, **options)
        env = {name: value for name, value in options["env"].items() if name != "PYTEST_CURRENT_TEST"}
        key = frozenset(env.items())
        # What was used last is last.
        self[key] = parent = self.pop(key, None) or Parent(env)
        # Each holds a gigabyte, and no cluster has workers of more than three.
        self.end(most=3)
        return Worker(parent, command[3:], options["stdout"].fileno())

    def end(self, most: int = 0) -> None:
        while len(self) > most:
            parent = self.pop(next(iter(self)))
            parent.here.close()
            parent.process.wait()


def fork_workers(there: socket.socket) -> list[str] | None:
    """Fork until nobody asks any more. Returns in each worker, with its arguments."""
    while True:
        data, files, _, _ = socket.recv_fds(there, 1 << 16, 1)
        if not data:
            return None
        question = json.loads(data)
        if isinstance(question, int):
            pid, status = os.waitpid(question, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                os.setsid()
                os.dup2(files[0], 1)
                os.dup2(files[0], 2)
                there.close()
            os.close(files[0])
            if answer == 0:
                return question
        there.send(json.dumps(answer).encode())


if __name__ == "__main__":
    # As with -m.
    sys.path[0] = os.getcwd()
    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force)
    for name in IMPORTED:
        importlib.import_module("sglang.srt." + name)
    gc.collect()
    gc.freeze()
    arguments = fork_workers(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
