"""A prefill/decode deployment on this machine as one object: start it, use it, and be sure that it is gone.

    with Cluster("model", decode_args=["--disaggregation-decode-enable-radix-cache"]) as cluster:
        requests.post(cluster.router_url + "/generate", json=...)

Every server runs in a session of its own, so a Ctrl-C in the terminal reaches only the owner, which then ends each
whole process group. A watchdog process holds the other end of a pipe: should the owner be killed outright, the pipe
closes and the watchdog ends what is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host

from . import process_group
from .netns import Host

HOST = "127.0.0.1"
RADIX_FLAG = "--disaggregation-decode-enable-radix-cache"
# Long enough for the engine to drain and leave by itself, short enough for somebody who waits after Ctrl-C.
STOP_GRACE_S = 5.0
# Per worker on a CPU host. Left alone, the engine takes most of the memory for the KV of each worker, and sizes its
# tables for thousands of requests, which costs seconds of filling them with zeros.
CPU_POOL_TOKENS = 32768
CPU_RUNNING_REQUESTS = 64
# Of every worker. The router keeps an idle connection for 50 s and the engine for 5 (sgl-project/sglang#20851): what is
# asked over one in the moment in which the engine gives it up comes to nothing.
ENGINE_ENV = {"SGLANG_TIMEOUT_KEEP_ALIVE": "120"}
# Where an engine with DP attention listens, from its port on: for its DP ranks' handshake, and for its own processes.
DP_ATTENTION_OFFSETS = (0, 13, *range(233, 239))
#: The options that choose an attention backend.
ATTENTION_OPTIONS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
# Part of a GPU's memory that workers which share it divide among them; the rest is for activations and CUDA graphs.
_SHARED_GPU_MEMORY = 0.85
# What others take while a worker starts counts against its part; of so large a part it may.
_NEARLY_ALL = 0.8

#: Options of one role: one list for all its workers, or one list per worker.
RoleArgs = Sequence[str] | Sequence[Sequence[str]]
RoleEnv = Mapping[str, str] | Sequence[Mapping[str, str]]

# Options that the cluster sets itself, because the parts have to agree on them.
OWNED_OPTIONS = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--disaggregation-mode",
    "--disaggregation-bootstrap-port",
    "--disaggregation-transfer-backend",
)

# What a start-up log says, in the order in which it says it. The last match is the phase that is shown.
_PHASES = (
    ("server_args=", "starting processes"),
    ("Init torch distributed begin", "setting up"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating the KV cache"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("Uvicorn running on", "warming up"),
    ("ready to roll", "warmed up"),
)


@dataclass
class Process:
    """One server: what it is, where it answers and where it writes.

    It starts when all processes of lower ``wave`` are ready. ``ready_s`` is None until it answers its health check.
    """

    role: str
    name: str
    url: str
    log_path: Path
    command: list[str]
    env: dict[str, str]
    bootstrap_port: int | None = None
    wave: int = 0
    pid: int = 0
    ready_s: float | None = None
    phase: str = "waiting"
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs (or has not been started)."""
        return self.popen.poll() if self.popen else None

    def describe(self) -> dict[str, Any]:
        """The entry of this process in the JSON file of ``pd-radix up``."""
        entry: dict[str, Any] = {"role": self.role, "name": self.name, "url": self.url, "pid": self.pid}
        if self.bootstrap_port is not None:
            entry["bootstrap_port"] = self.bootstrap_port
        return {**entry, "log": str(self.log_path), "command": self.command}


@dataclass(frozen=True)
class Progress:
    """``process`` (None: the whole cluster) entered ``phase``, ``elapsed_s`` seconds after the start."""

    process: Process | None
    phase: str
    elapsed_s: float

    def __str__(self) -> str:
        return f"[{self.elapsed_s:5.1f} s] {self.process.name if self.process else 'cluster'}: {self.phase}"


# ------------------------------------------------------------------------------------------------------------- pieces


def free_ports(count: int, host: str = HOST, taken: Collection[int] = (), offsets: Sequence[int] = (0,)) -> list[int]:
    """``count`` different ports that nothing listens on now, and that are not ``taken``.

    offsets: where a server listens, counted from its port; all of these are free too, and nobody else's.

    They lie below the range from which the system takes ports for outgoing connections: a server binds its port many
    seconds after this call, and such a connection could have taken it by then.
    """
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = 32768
    candidates = range(10000, first_ephemeral) if first_ephemeral > 11000 else range(10000, 65536)
    found: list[int] = []
    reserved = set(taken)
    for port in random.Random(os.urandom(8)).sample(candidates, min(len(candidates), 50 * count + 200)):
        if len(found) == count:
            break
        places = {port + offset for offset in offsets}
        if places & reserved or max(places) >= candidates.stop or not all(_is_free(host, place) for place in places):
            continue
        reserved |= places
        found.append(port)
    if len(found) < count:
        raise PdRadixError(f"found only {len(found)} of {count} free ports on {host}: close some listening programs")
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def ports_named(args: Sequence[str]) -> set[int]:
    """Every number in ``args`` that may be a port."""
    return {int(number) for arg in args for number in re.findall(r"(?<!\d)\d{4,5}(?!\d)", arg)}


# The same decode worker for all requests of one X-SMG-Routing-Key, and any for those without.
BY_ROUTING_KEY = ["--decode-policy", "manual", "--assignment-mode", "min_load"]


def has_option(args: Sequence[str], *names: str) -> bool:
    """True if one of the options ``names`` is among ``args``, as ``--name value`` or ``--name=value``."""
    return any(arg.split("=", 1)[0] in names for arg in args)


def option_value(args: Sequence[str], *names: str) -> str | None:
    """The last value of option ``names`` in ``args``; None if it is not there."""
    found = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else (args[i + 1] if i + 1 < len(args) else None)
    return found


def per_worker(args: RoleArgs, count: int, what: str) -> list[list[str]]:
    """One argument list per worker, from one list for all or a list of lists. Raises PdRadixError on a wrong count."""
    if not args or all(isinstance(arg, str) for arg in args):
        return [[str(arg) for arg in args] for _ in range(count)]
    if len(args) != count or any(isinstance(arg, str) for arg in args):
        raise PdRadixError(f"{what}: give one list of options for all, or {count} lists, one per worker")
    return [list(arg) for arg in args]


def gpu_count() -> int:
    """GPUs that a worker started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def cpu_options(args: Sequence[str]) -> list[str]:
    """What an engine on a CPU host needs beyond the user's ``args``."""
    options: list[str] = []
    if not has_option(args, "--device"):
        options += ["--device", "cpu"]
    # Compiled as a whole, a model cannot have that one, and drafts have another.
    if not has_option(args, *ATTENTION_OPTIONS, "--enable-torch-compile", "--speculative-algorithm"):
        options += ["--attention-backend", cpu_host.attention.NAME]
    if not has_option(args, "--dtype"):
        options += ["--dtype", "float32"]
    if not has_option(args, "--max-total-tokens", "--mem-fraction-static"):
        options += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    if not has_option(args, "--max-running-requests"):
        options += ["--max-running-requests", str(CPU_RUNNING_REQUESTS)]
    return options


def cpu_env(workers: int, backend: str) -> dict[str, str]:
    """Environment for ``workers`` engines that share this CPU host."""
    cores = len(os.sched_getaffinity(0))
    # More spinning OpenMP threads than cores stall each other: ten times slower on two cores.
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // max(1, workers)))}
    if backend == "mooncake":
        wanted["MC_FORCE_TCP"] = "1"
    return wanted


def log_tail(path: Path, lines: int = 20) -> list[str]:
    """The last ``lines`` lines of a log (an empty list if there is none), without reading all of a long one."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 400 * lines - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    plain = _ANSI.sub("", text)
    return [line.rstrip() for line in plain.splitlines() if line.strip()][-lines:]


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# Lines that end a traceback, or a message of argparse or of the shell of the engine.
_ERROR_LINE = re.compile(
    r"^(?:\[[^\]]*\] )?(?:[\w. -]+: error: .+|(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$"
)
# What the engine says when one of its processes ended without a word.
_CRASH_LINE = re.compile(r"Subprocess \S+ .*crashed with exit code -?\d+")
# Consequences of the real cause in another process of the same server.
_SECONDARY = ("EOFError", "SystemExit", "KeyboardInterrupt", "BrokenPipeError", "ConnectionResetError")


def failure_reason(lines: Sequence[str]) -> str | None:
    """The line of a log that names the cause of death: the last error that is not the echo of another one."""
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line.strip())]
    causes = [line for line in errors if not line.startswith(_SECONDARY)]
    crashes = [match.group() for match in map(_CRASH_LINE.search, lines) if match]
    found = causes or crashes or errors
    return found[-1] if found else None


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by {name}"
    return f"was killed by signal {-code}"


def local_session() -> requests.Session:
    """A session for the servers of this machine, on which a proxy of the environment has no business."""
    session = requests.Session()
    session.trust_env = False
    return session


def http(url: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET ``url`` (or POST ``body`` as JSON). Returns status and content; status 0 if nobody answered."""
    with local_session() as session:
        try:
            reply = session.request("GET" if body is None else "POST", url, json=body, timeout=timeout)
        except (requests.RequestException, ValueError) as error:
            return 0, str(error).encode()
    return reply.status_code, reply.content


class _Family:
    """The process groups of one cluster, and the watchdog that outlives a killed owner."""

    def __init__(self) -> None:
        self._watchdog: subprocess.Popen[bytes] | None = None

    def start(self, process: Process) -> None:
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", process_group.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        process.log_path.parent.mkdir(parents=True, exist_ok=True)
        with process.log_path.open("wb") as log:
            process.popen = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=process.env,
                start_new_session=True,
            )
        process.pid = process.popen.pid
        self._tell("+", process.pid)

    def _tell(self, sign: str, pid: int) -> None:
        if self._watchdog and self._watchdog.stdin:
            with contextlib.suppress(OSError):
                self._watchdog.stdin.write(f"{sign} {pid}\n".encode())
                self._watchdog.stdin.flush()

    def stop(self, processes: Sequence[Process], grace_s: float) -> None:
        """End every process of every group: ask, wait up to ``grace_s`` seconds for all together, then kill."""
        started = [p for p in processes if p.popen]
        for process in started:
            assert process.popen
            if process.popen.poll() is None:
                # Only the leader is asked: it knows in which order to end its own workers.
                with contextlib.suppress(ProcessLookupError):
                    process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        running = list(started)
        while running:
            late = time.monotonic() >= deadline
            for process in running[:]:
                # What a leader that has ended left behind has nobody to work for.
                if late or process.returncode() is not None:
                    process_group.kill(process.pid)
                    running.remove(process)
            time.sleep(0.02)
        deadline = time.monotonic() + 10
        for process in started:
            assert process.popen
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=max(0.1, deadline - time.monotonic()))
            process_group.wait_gone(process.pid, deadline - time.monotonic())
            self._tell("-", process.pid)
        if self._watchdog and self._watchdog.stdin:
            self._watchdog.stdin.close()
            self._watchdog.wait(timeout=10)
            self._watchdog = None


# ------------------------------------------------------------------------------------------------------------ cluster


class Cluster:
    """``prefill`` prefill workers, ``decode`` decode workers and the router, or one ordinary engine (``aggregated``).

    Arguments are lists as for a command line. ``prefill_args``, ``decode_args`` and the two ``*_env`` are for all
    workers of the role, or one entry per worker. ``aggregated_args`` are for the aggregated engine alone. Of a repeated
    option the later one wins: ours, ``common_args``, then the role's. Nothing is started before `start`.

    ``on_progress`` is told of every step. ``on_wait`` is called every 0.1 s while waiting, and start-up ends with what
    it raises. ``executable`` is the interpreter of the servers; ``commands`` replaces the arguments with which it runs
    a role ("prefill", "decode", "router", "engine"), which tests use.

    ``routers`` starts one router per entry in the place of the single one: name to (indices of the decode workers that
    it routes to, further options for it). All route to every prefill worker. ``router_urls`` has their addresses.
    Without a ``policy``, and with none among its options, a router sends all requests of one ``X-SMG-Routing-Key`` to
    the same decode worker.

    ``hosts`` has the host of `netns.TwoHosts` on which the workers of a role run; by default all run on this one. The
    router always does.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        prefill: int = 1,
        decode: int = 1,
        common_args: Sequence[str] = (),
        prefill_args: RoleArgs = (),
        decode_args: RoleArgs = (),
        router_args: Sequence[str] = (),
        aggregated_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefill_env: RoleEnv = (),
        decode_env: RoleEnv = (),
        backend: str = "nixl",
        policy: str | None = None,
        host: str = HOST,
        port: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        aggregated: bool = False,
        timeout_s: float = 600.0,
        on_progress: Callable[[Progress], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        executable: str = sys.executable,
        commands: Mapping[str, Sequence[str]] | None = None,
        routers: Mapping[str, tuple[Sequence[int], Sequence[str]]] | None = None,
        hosts: Mapping[str, Host] | None = None,
        pegaflow: Sequence[str] | None = None,
    ) -> None:
        if prefill < 1 or decode < 1:
            raise PdRadixError(f"{prefill} prefill and {decode} decode workers: at least one of each is needed")
        self._prefill_args = per_worker(prefill_args, prefill, "prefill_args")
        self._decode_args = per_worker(decode_args, decode, "decode_args")
        for args in (common_args, aggregated_args, *self._prefill_args, *self._decode_args):
            _refuse_owned(args)
        self.model_path = str(model_path)
        self.backend = backend
        self.aggregated = aggregated
        self.timeout_s = timeout_s
        self._prefill, self._decode = prefill, decode
        self._common = list(common_args)
        self._aggregated_args = list(aggregated_args)
        self._router_args = list(router_args)
        self._env = {**os.environ, **(env or {})}
        self._prefill_env = _per_worker_env(prefill_env, prefill, "prefill_env")
        self._decode_env = _per_worker_env(decode_env, decode, "decode_env")
        self._policy, self._host, self._port = policy, host, port
        self._log_dir = Path(log_dir) if log_dir else None
        self._on_progress, self._on_wait = on_progress, on_wait
        self._executable = executable
        self._commands = commands or {}
        self._routers = dict(routers or {})
        self._hosts = dict(hosts or {})
        self._pegaflow = None if pegaflow is None else list(pegaflow)
        for name, (indices, _) in self._routers.items():
            if not indices or not all(0 <= index < decode for index in indices):
                raise PdRadixError(
                    f"routers: {name} routes to {list(indices)}, and decode workers are 0 to {decode - 1}"
                )
        self._family = _Family()
        self._started_at = 0.0
        self._stopping = threading.Event()
        self.processes: list[Process] = []

    # -- what it looks like

    @property
    def log_dir(self) -> Path:
        """Where the logs are; they stay when the cluster is gone."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="pd-radix-"))
        return self._log_dir

    def _role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    @property
    def router_url(self) -> str:
        """Where requests go: the router, or the engine itself if aggregated."""
        return self._role("engine" if self.aggregated else "router")[0].url

    @property
    def router_urls(self) -> dict[str, str]:
        """Address of every router, by its name in ``routers`` ("router" for the single one)."""
        return {process.name.removeprefix("router-"): process.url for process in self._role("router")}

    @property
    def prefill_urls(self) -> list[str]:
        return [process.url for process in self._role("prefill")]

    @property
    def decode_urls(self) -> list[str]:
        return [process.url for process in self._role("decode")]

    def describe(self) -> dict[str, Any]:
        """Everything a script needs to use this cluster, ready for JSON."""
        return {
            "model": self.model_path,
            "backend": None if self.aggregated else self.backend,
            "owner_pid": os.getpid(),
            "router_url": self.router_url,
            "prefill_urls": self.prefill_urls,
            "decode_urls": self.decode_urls,
            "log_dir": str(self.log_dir),
            "processes": [process.describe() for process in self.processes],
        }

    # -- commands

    def _engine(
        self, role: str, index: int, port: int, args: Sequence[str], extra: Sequence[str], env: Mapping[str, str]
    ) -> Process:
        place = self._hosts.get(role)
        address = place.address if place else self._host if role == "engine" else HOST
        url = f"http://{_connectable(address)}:{port}"
        command = [self._executable, *self._commands.get(role, ("-m", "sglang.launch_server"))]
        command += ["--model-path", self.model_path, "--port", str(port), "--host", address, *extra, *args]
        env = {**self._env, **env}
        if place:
            command, env = place.command(*command), {**env, **place.environment(env)}
        name = role if role == "engine" else f"{role}-{index}"
        return Process(role, name, url, self.log_dir / f"{name}.log", command, env)

    def _plan(self) -> list[Process]:
        """Lay out every process: ports, devices, commands. Nothing runs yet."""
        cpu = cpu_host.active()
        workers = 1 if self.aggregated else self._prefill + self._decode
        # Two per worker (its own, and that of its process group), one more per prefill (bootstrap), two per router and
        # for PegaFlow.
        routers = 0 if self.aggregated else max(1, len(self._routers))
        count = 2 * workers + 2 * routers + (0 if self.aggregated else self._prefill) + 2
        ports = iter(self._free_ports(count))
        env = ENGINE_ENV | (cpu_env(workers, self.backend) if cpu else {})
        env = {name: value for name, value in env.items() if name not in self._env}
        roles: list[tuple[str, int, list[str], Mapping[str, str]]]
        if self.aggregated:
            roles = [("engine", 0, self._aggregated_args, {})]
        else:
            roles = [("prefill", i, args, self._prefill_env[i]) for i, args in enumerate(self._prefill_args)]
            roles += [("decode", i, args, self._decode_env[i]) for i, args in enumerate(self._decode_args)]
        processes = []
        common = self._common
        if self._pegaflow is not None:
            server, endpoint = self._pegaflow_server(next(ports), next(ports))
            processes.append(server)
            common = [*common, "--enable-pegaflow", "--pegaflow-endpoint", endpoint]
        arguments = [[*common, *args] for _, _, args, _ in roles]
        if cpu:
            placement = [(cpu_options(args), 0) for args in arguments]
        else:
            placement = gpu_placement(arguments, gpu_count())
        for (role, index, _, own_env), args, (extra, wave) in zip(roles, arguments, placement, strict=True):
            if role == "engine":
                port = self._port or next(ports)
            else:
                port = next(ports)
                extra = [*extra, "--disaggregation-mode", role, "--disaggregation-transfer-backend", self.backend]
            # The engine's own choice is an ephemeral port, which a connection may have taken by the time it listens. DP
            # ranks that are engines by themselves would all be given the one that is named here.
            if has_option(args, "--enable-dp-attention") or not has_option(args, "--dp-size", "--data-parallel-size"):
                extra = [*extra, "--nccl-port", str(next(ports))]
            bootstrap = next(ports) if role == "prefill" else None
            if bootstrap is not None:
                extra = [*extra, "--disaggregation-bootstrap-port", str(bootstrap)]
            process = self._engine(role, index, port, args, extra, {**env, **own_env})
            process.bootstrap_port, process.wave = bootstrap, wave
            processes.append(process)
        workers_of = [process for process in processes if process.role != "pegaflow"]
        if not self.aggregated and not self._routers:
            processes.append(self._router("router", workers_of, (), self._port or next(ports), next(ports)))
        for i, (name, (indices, more)) in enumerate(() if self.aggregated else self._routers.items()):
            chosen = {f"decode-{index}" for index in indices}
            behind = [worker for worker in workers_of if worker.role == "prefill" or worker.name in chosen]
            port = self._port if self._port and i == 0 else next(ports)
            processes.append(self._router(f"router-{name}", behind, more, port, next(ports)))
        return processes

    def _free_ports(self, count: int) -> list[int]:
        """Ports beside those that the caller has named."""
        engines = [*self._common, *self._aggregated_args, *itertools.chain(*self._prefill_args, *self._decode_args)]
        offsets = DP_ATTENTION_OFFSETS if has_option(engines, "--enable-dp-attention") else (0,)
        routers = [arg for _, more in self._routers.values() for arg in more]
        taken = ports_named([*engines, *self._router_args, *routers, *(self._pegaflow or ())])
        if self._port:
            taken |= {self._port + offset for offset in offsets}
        return free_ports(count, taken=taken, offsets=offsets)

    def _pegaflow_server(self, port: int, http_port: int) -> tuple[Process, str]:
        """A PegaFlow server, which the workers look for when they start, and where it listens: on loopback only."""
        assert self._pegaflow is not None
        _refuse_owned(self._pegaflow, ("--addr", "--http-addr"), "options of the PegaFlow server")
        command = [self._executable, *self._commands.get("pegaflow", ("-m", "pegaflow._server"))]
        endpoint = f"{HOST}:{port}"
        command += ["--addr", endpoint, "--http-addr", f"{HOST}:{http_port}", *self._pegaflow]
        url, log = f"http://{HOST}:{http_port}", self.log_dir / "pegaflow.log"
        return Process("pegaflow", "pegaflow", url, log, command, dict(self._env), wave=-1), endpoint

    def _router(
        self, name: str, workers: Sequence[Process], more: Sequence[str], port: int, metrics_port: int
    ) -> Process:
        command = [self._executable, *self._commands.get("router", ("-m", "sglang_router.launch_router"))]
        command += ["--pd-disaggregation", "--host", self._host, "--port", str(port)]
        for worker in workers:
            if worker.role == "prefill":
                command += ["--prefill", worker.url, str(worker.bootstrap_port)]
            else:
                command += ["--decode", worker.url]
        # By default it writes four lines per request, and every router of a machine wants the same metrics port.
        for option, value in (
            ("--log-level", "warn"),
            ("--worker-startup-check-interval", "1"),
            ("--prometheus-port", str(metrics_port)),
            ("--prometheus-host", HOST),
        ):
            if not has_option([*self._router_args, *more], option):
                command += [option, value]
        several = sum(worker.role == "decode" for worker in workers) > 1
        if self._policy:
            command += ["--policy", self._policy]
        elif several and not has_option([*self._router_args, *more], "--policy", "--decode-policy"):
            # The router's own default chooses at random among these.
            command += BY_ROUTING_KEY
        command += [*self._router_args, *more]
        env = dict(self._env)
        for host in self._hosts.values():
            env |= host.unproxied(env)
        url = f"http://{_connectable(self._host)}:{port}"
        # The router asks less and less often for workers that do not answer, so it is quicker to start it after them.
        wave = 1 + max(worker.wave for worker in workers)
        return Process("router", name, url, self.log_dir / f"{name}.log", command, env, wave=wave)

    # -- life

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return once a request has gone through. On any failure nothing is left running.

        Raises PdRadixError: a process died (with the reason and the end of its log) or ``timeout_s`` passed.
        """
        if self.processes:
            raise PdRadixError("this cluster was started before: make a new one")
        self._started_at = time.monotonic()
        self.processes = self._plan()
        try:
            for wave in sorted({process.wave for process in self.processes}):
                together = [process for process in self.processes if process.wave == wave]
                for process in together:
                    self._family.start(process)
                    self._report(process, "starting")
                self._wait_ready(together)
            self._wait_served()
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every process and wait until all are gone. May be called twice, and after a failed start."""
        self._stopping.set()
        self.resume()  # a paused process does not hear that it shall end
        self._family.stop(self.processes, grace_s)

    def pause(self, names: Collection[str]) -> None:
        """Stop the processes of these servers where they are (SIGSTOP): they keep their memory and use no CPU.

        An idle engine polls its queues without a break, which on a small machine slows down whoever is at work.
        """
        self._signal(names, signal.SIGSTOP)

    def resume(self, names: Collection[str] | None = None) -> None:
        """Let paused servers go on; all of them by default."""
        self._signal(names, signal.SIGCONT)

    def _signal(self, names: Collection[str] | None, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.popen and process.returncode() is None and (names is None or process.name in names):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)

    def kill(self, name: str) -> None:
        """End one server's processes at once (SIGKILL), as a crash or a lost machine would."""
        process = next(process for process in self.processes if process.name == name)
        process_group.kill(process.pid, tracker_s=0.0)
        assert process.popen
        process.popen.wait(timeout=10)
        process_group.wait_gone(process.pid, 10)

    def restart(self, name: str) -> None:
        """Start a server that has ended again, with the same command and ports, and wait until it is ready.

        Others may end meanwhile. Raises PdRadixError: this one did, or ``timeout_s`` passed.
        """
        process = next(process for process in self.processes if process.name == name)
        process.ready_s, self._started_at = None, time.monotonic()
        self._family.start(process)
        self._wait_ready([process], [process])

    def dead(self, among: Sequence[Process] | None = None) -> Process | None:
        """The first process that has ended, if any has; of ``among``, or of all."""
        processes = self.processes if among is None else among
        return next((process for process in processes if process.returncode() is not None), None)

    def alive(self) -> bool:
        """True while every process of the started cluster runs."""
        return bool(self.processes) and all(p.popen is not None for p in self.processes) and self.dead() is None

    def check(self, among: Sequence[Process] | None = None) -> None:
        """Raise PdRadixError, with the reason and the end of its log, if a process has ended; of ``among``, or any."""
        process = self.dead(among)
        if process is not None:
            raise PdRadixError(self._obituary(process))

    def _obituary(self, process: Process) -> str:
        code = process.returncode()
        assert code is not None
        lines = log_tail(process.log_path, 400)
        reason = failure_reason(lines)
        message = f"{process.name} {describe_exit(code)}"
        if reason:
            message += f": {reason}"
        elif code == -signal.SIGKILL:
            message += "; if nobody did that, the machine ran out of memory"
        if not lines:
            return f"{message}; its log {process.log_path} is empty"
        if reason and ": error: " in reason:
            return f"{message}\nIts log is {process.log_path}"  # a usage error: above it are only pages of usage
        tail = "\n".join(f"  | {line}" for line in lines[-20:])
        return f"{message}\nThe end of its log, {process.log_path}:\n{tail}"

    def _report(self, process: Process | None, phase: str) -> None:
        if process is not None:
            if process.phase == phase:
                return
            process.phase = phase
        if self._on_progress:
            self._on_progress(Progress(process, phase, time.monotonic() - self._started_at))

    def _left(self) -> float:
        return self._started_at + self.timeout_s - time.monotonic()

    def _watch(self, doing: Callable[[], str], among: Sequence[Process] | None = None) -> None:
        """Called while waiting: fail at once on a death or when the time is up, and report phases."""
        if self._on_wait:
            self._on_wait()
        self.check(among)
        if self._left() <= 0:
            raise PdRadixError(
                f"not ready after {self.timeout_s:g} s: {doing()}. Logs are in {self.log_dir}; "
                "give more time with --timeout if they show progress"
            )
        for process in self.processes:
            if process.popen and process.ready_s is None and process.role != "router":
                phase = current_phase(process.log_path)
                if phase:
                    self._report(process, phase)

    def _wait_ready(self, processes: Sequence[Process], among: Sequence[Process] | None = None) -> None:
        """Wait until each of ``processes`` is healthy; one of ``among`` (all) that ends ends the wait.

        Asking happens in threads: an answer takes a second or more.
        """
        threads = []
        for process in processes:
            if process.ready_s is None:
                thread = threading.Thread(target=self._ask_until_ready, args=(process,), daemon=True)
                thread.start()
                threads.append(thread)
        while any(process.ready_s is None for process in processes):
            self._watch(lambda: ", ".join(f"{p.name} is {p.phase}" for p in processes if p.ready_s is None), among)
            for process in processes:
                if process.ready_s is not None:
                    self._report(process, f"ready after {process.ready_s:.1f} s")
            time.sleep(0.1)
        for process in processes:
            assert process.ready_s is not None
            self._report(process, f"ready after {process.ready_s:.1f} s")

    def _ask_until_ready(self, process: Process) -> None:
        # The router answers /health long before it has a worker; /readiness says that it has one of each kind.
        path = "/readiness" if process.role == "router" else "/health"
        while not self._stopping.is_set() and process.returncode() is None:
            if http(process.url + path, timeout=25)[0] == 200:
                process.ready_s = time.monotonic() - self._started_at
                return
            time.sleep(0.2)

    def _wait_served(self) -> None:
        """Send short requests until one has gone all the way through, then forget what they left in the caches."""
        self._report(None, "sending a request through")
        for url in self.router_urls.values() or [self.router_url]:
            self._wait_served_by(url)
        for worker in self.processes:
            if worker.role not in ("router", "pegaflow"):
                http(worker.url + "/flush_cache", {}, timeout=10)
        self._report(None, "serving")

    def _wait_served_by(self, url: str) -> None:
        body = {"text": "ready", "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            answers.append(http(url + "/generate", body, max(1.0, self._left())))

        def trouble() -> str:
            if not answers:
                return "a request through the router got no answer"
            status, content = answers[-1]
            return f"requests through the router fail with HTTP {status}: {content.decode(errors='replace')[:300]}"

        while not answers or answers[-1][0] != 200:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            while thread.is_alive():
                self._watch(trouble)
                thread.join(0.1)
            self._watch(trouble)
            if answers[-1][0] in (400, 401, 403, 404, 422):
                raise PdRadixError(f"{trouble()}. Logs are in {self.log_dir}")
            if answers[-1][0] != 200:
                time.sleep(0.2)


def gpu_placement(arguments: Sequence[Sequence[str]], gpus: int) -> list[tuple[list[str], int]]:
    """Extra options and the wave of each worker on a host with ``gpus`` GPUs, from each worker's own arguments.

    Workers take the next GPUs in turn. Where they have to share one, each gets an equal part of its memory. The engine
    measures its part by what is free when it starts, so workers that share start one after the other, unless the sizes
    of their pools are told and each may take nearly all.
    """
    sizes = [_gpus_needed(args) for args in arguments]
    if gpus == 0:
        return [([], 0) for _ in arguments]
    if max(sizes) > gpus:
        raise PdRadixError(f"a worker needs {max(sizes)} GPUs and this machine has {gpus}: lower --tp")
    shared = sum(sizes) > gpus
    first, cursor = [], 0
    for size in sizes:
        if cursor + size > gpus:
            cursor = 0
        first.append(cursor)
        cursor += size
    used = [set(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    together = all(_may_take(args) >= _NEARLY_ALL and has_option(args, "--max-total-tokens") for args in arguments)
    waves: list[int] = []
    for i, devices in enumerate(used):
        before = [] if together else [waves[j] for j in range(i) if used[j] & devices]
        waves.append(1 + max(before, default=-1))
    placement = []
    for args, start, wave, devices in zip(arguments, first, waves, used, strict=True):
        extra = [] if has_option(args, "--base-gpu-id") else ["--base-gpu-id", str(start)]
        if shared and not has_option(args, "--mem-fraction-static"):
            sharers = max(sum(gpu in other for other in used) for gpu in devices)
            part = _SHARED_GPU_MEMORY / sharers
            extra += ["--mem-fraction-static", f"{part / (1 - wave * part):.3f}"]
        placement.append((extra, wave))
    return placement


def _may_take(args: Sequence[str]) -> float:
    try:
        return float(option_value(args, "--mem-fraction-static") or 0)
    except ValueError as error:
        raise PdRadixError(f"--mem-fraction-static takes a number: {error}") from None


def _gpus_needed(args: Sequence[str]) -> int:
    try:
        ranks = int(option_value(args, "--tp", "--tp-size", "--tensor-parallel-size") or 1)
        return ranks * int(option_value(args, "--pp", "--pp-size", "--pipeline-parallel-size") or 1)
    except ValueError as error:
        raise PdRadixError(f"--tp and --pp take a number: {error}") from None


def current_phase(log_path: Path) -> str | None:
    """The start-up phase that a server's log shows."""
    text = "\n".join(log_tail(log_path, 60))
    found = None
    for marker, phase in _PHASES:
        if marker in text:
            found = phase
    return found


def _connectable(host: str) -> str:
    """An address at which a server that listens on ``host`` can be reached from here."""
    return HOST if host in ("0.0.0.0", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host


def _refuse_owned(args: Sequence[str], owned: Sequence[str] = OWNED_OPTIONS, where: str = "engine options") -> None:
    for option in owned:
        if has_option(args, option):
            raise PdRadixError(f"{option} is set by the cluster itself: remove it from the {where}")


def _per_worker_env(env: RoleEnv, count: int, what: str) -> list[dict[str, str]]:
    if isinstance(env, Mapping):
        return [dict(env) for _ in range(count)]
    if env and len(env) != count:
        raise PdRadixError(f"{what}: give one mapping for all, or {count}, one per worker")
    return [dict(entry) for entry in env] or [{} for _ in range(count)]
