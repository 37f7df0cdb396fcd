"""Makes processes from a `Spec`: ports, devices, commands. Starts nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sglang_pd_radix.supplied import cpu_host

from . import gateway
from .devices import cpu_env, cpu_options, gpu_count, gpu_placement
from .options import DP_OPTIONS, HOST, bracketed, connectable, has_option, ports_named
from .ports import DP_ATTENTION_OFFSETS, free_ports
from .process import Process
from .spec import Spec

# Addresses of this machine's servers.
LOCAL = (HOST, "::1", "localhost")


def unproxied(environ: Mapping[str, str], addresses: Iterable[str]) -> dict[str, str]:
    """Environment that exempts ``addresses`` from a proxy in ``environ``, besides existing exemptions."""
    names = ("no_proxy", "NO_PROXY")
    given = [address for name in names for address in environ.get(name, "").split(",") if address]
    # "*" stands for all only if it is the only entry.
    direct = ["*"] if "*" in given else [*given, *addresses]
    return dict.fromkeys(names, ",".join(dict.fromkeys(direct)))


def lay_out(spec: Spec, log_dir: Path) -> list[Process]:
    """All processes of the deployment, workers before routers."""
    ports = _ports(spec)
    inherited = {**os.environ, **spec.env}
    processes = []
    served: list[str] = []
    if spec.pegaflow is not None:
        server, endpoint = _pegaflow_server(spec, spec.pegaflow, inherited, log_dir, ports)
        processes.append(server)
        served = ["--enable-pegaflow", "--pegaflow-endpoint", endpoint]
    workers = list(_workers(spec, inherited, log_dir, ports, served))
    processes += workers
    for number, (name, (indices, more)) in enumerate(spec.named_routers.items()):
        chosen = {f"decode-{index}" for index in indices}
        behind = [worker for worker in workers if worker.role == "prefill" or worker.name in chosen]
        port = spec.port if spec.port and number == 0 else next(ports)
        processes.append(_router(spec, name, behind, more, inherited, log_dir, (port, next(ports))))
    for name, more in spec.named_ordinary_routers.items():
        behind = [worker for worker in workers if worker.role == "engine"]
        processes.append(_router(spec, name, behind, more, inherited, log_dir, (next(ports), next(ports))))
    for process in processes:
        # Workers call each other, and themselves at warm-up.
        process.env |= unproxied(process.env, LOCAL)
    return processes


def _ports(spec: Spec) -> Iterator[int]:
    """Enough free ports, besides those named by the caller."""
    engines = spec.engines()
    given = [*spec.common_args, *itertools.chain(*(args for role in spec.args_of.values() for args in role))]
    offsets = DP_ATTENTION_OFFSETS if has_option(given, "--enable-dp-attention") else (0,)
    routers = [arg for _, more in spec.routers.values() for arg in more]
    routers += itertools.chain(*spec.ordinary_routers.values())
    taken = ports_named([*given, *spec.router_args, *routers, *(spec.pegaflow or ())])
    if spec.port:
        taken |= {spec.port + offset for offset in offsets}
    # Per worker two (its own, and its process group's), one more per prefill (bootstrap), two per router and for
    # PegaFlow.
    prefills = sum(role == "prefill" for role, _, _ in engines)
    count = 2 * len(engines) + prefills + 2 * len(spec.named_routers) + 2 * len(spec.ordinary_routers) + 2
    return iter(free_ports(count, taken=taken, offsets=offsets))


def _workers(
    spec: Spec, inherited: Mapping[str, str], log_dir: Path, ports: Iterator[int], served: Sequence[str]
) -> Iterator[Process]:
    """The engines. served: options of all for a shared server, before their own."""
    engines = spec.engines(served)
    arguments = [args for _, _, args in engines]
    cpu = cpu_host.active()
    placement = [(cpu_options(args), 0) for args in arguments] if cpu else gpu_placement(arguments, gpu_count())
    defaults = cpu_env(arguments, spec.backend) if cpu else {}
    defaults = {name: value for name, value in defaults.items() if name not in inherited}
    for (role, index, args), (extra, wave) in zip(engines, placement, strict=True):
        port = (spec.port if spec.aggregated else None) or next(ports)
        if role != "engine":
            extra = [*extra, "--disaggregation-mode", role, "--disaggregation-transfer-backend", spec.backend]
        # By default the engine takes an ephemeral port, which a connection may occupy before the engine listens. DP
        # ranks that are engines of their own would all get this port.
        if has_option(args, "--enable-dp-attention") or not has_option(args, *DP_OPTIONS):
            extra = [*extra, "--nccl-port", str(next(ports))]
        bootstrap = next(ports) if role == "prefill" else None
        if bootstrap is not None:
            extra = [*extra, "--disaggregation-bootstrap-port", str(bootstrap)]
        env = {**inherited, **defaults, **spec.env_of[role][index]}
        process = _engine(spec, role, index, port, [*extra, *args], env, log_dir)
        process.bootstrap_port, process.wave = bootstrap, wave
        yield process


def _engine(
    spec: Spec, role: str, index: int, port: int, args: Sequence[str], env: dict[str, str], log_dir: Path
) -> Process:
    place = spec.hosts.get(role)
    address = place.address if place else spec.host if spec.aggregated else HOST
    interpreter = spec.worker_executable or spec.executable
    command = [interpreter, *spec.commands.get(role, ("-m", "sglang.launch_server"))]
    command += ["--model-path", str(spec.model_path), "--port", str(port), "--host", address, *args]
    if place:
        command, env = place.command(*command), {**env, **place.environment(env)}
    name = role if spec.aggregated else f"{role}-{index}"
    return Process(role, name, f"http://{connectable(address)}:{port}", log_dir / f"{name}.log", command, env)


def _pegaflow_server(
    spec: Spec, options: Sequence[str], inherited: Mapping[str, str], log_dir: Path, ports: Iterator[int]
) -> tuple[Process, str]:
    """A PegaFlow server, which has to run before the workers, and its address (loopback)."""
    port, http_port = next(ports), next(ports)
    command = [spec.executable, *spec.commands.get("pegaflow", ("-m", "pegaflow._server"))]
    endpoint = f"{HOST}:{port}"
    command += ["--addr", endpoint, "--http-addr", f"{HOST}:{http_port}", *options]
    url, log = f"http://{HOST}:{http_port}", log_dir / "pegaflow.log"
    return Process("pegaflow", "pegaflow", url, log, command, dict(inherited), wave=-1), endpoint


def _router(
    spec: Spec,
    name: str,
    workers: Sequence[Process],
    more: Sequence[str],
    inherited: Mapping[str, str],
    log_dir: Path,
    ports: tuple[int, int],
) -> Process:
    """ports: its own, and its metrics'."""
    prefill = [(worker.url, worker.bootstrap_port or 0) for worker in workers if worker.role == "prefill"]
    decode = [worker.url for worker in workers if worker.role == "decode"]
    ordinary = [worker.url for worker in workers if worker.role == "engine"]
    command = [spec.executable, *spec.commands.get("router", spec.gateway.module)]
    command += ["--host", bracketed(spec.host), "--port", str(ports[0])]
    given = [*spec.router_args, *more]
    key = spec.api_key
    if key is not None and not has_option(given, "--api-key"):
        given += ["--api-key", key]
    command += gateway.options(spec.gateway, prefill, decode, given, ports[1], ordinary)
    env = dict(inherited)
    for host in spec.hosts.values():
        env |= host.unproxied(env)
    url = f"http://{connectable(spec.host)}:{ports[0]}"
    # The router polls unready workers less and less often, so it is started after them.
    wave = 1 + max(worker.wave for worker in workers)
    return Process("router", name, url, log_dir / f"{name}.log", command, env, wave=wave)
