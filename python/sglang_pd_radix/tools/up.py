"""``pd-radix up``: starts a prefill/decode deployment on this machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import ipaddress
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_pd_radix.environment import API_KEY, patches_engine
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader
from sglang_pd_radix.supplied import cpu_host, mooncake_host, pegaflow_host

from . import process_group
from .arguments import add_log_dir, keep_rest, split_options
from .cluster import (
    HOST,
    RADIX_FLAG,
    Cluster,
    add_router_option,
    has_option,
    named_gateway,
    option_value,
)
from .cluster.gateway import check_options
from .cluster.startup import NotReadyError
from .keeper import RESTARTS, STEADY_S, Keeper
from .progress import Display
from .trace import VARIABLE as ENDED_REQUESTS

RADIX_ALIAS = "--disaggregation-enable-decode-radix-cache"
_BACKENDS = ("nixl", "mooncake", "mori", "ascend", "fake")
#: Backends with a prefix cache on decode.
DELTA_BACKENDS = ("nixl", "mooncake")
# Longer than a page of 16 tokens, so that a repetition hits the cache.
_QUESTION = "Write a short story about a river that forgot its name. Begin with the weather, and end with the sea."
# Ended requests that each worker remembers for `pd-radix trace`.
_REMEMBERED = "1000"

_EPILOG = """
Any other option is the engine's, for all workers; after -- also one that has the name of an option here:

  pd-radix up --model-path DIR --decode 2 --page-size 16 --tp 2
  pd-radix up --model-path DIR --decode-args "--max-running-requests 8" --json up.json

Workers have --enable-metrics and --enable-cache-report, and remember 1000 ended requests for pd-radix trace.
The JSON file is written once requests are served and removed when they no longer are.
Exit code: 0 ended by Ctrl-C or SIGTERM while serving, 1 a process failed, 2 bad usage, 130 or 143 ended while starting.
"""


class _Ended(BaseException):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix up``. Apply `join_values` before parsing."""
    parser.description = "Start prefill workers, decode workers and the router on this machine, and end them together."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model-path", "--model", metavar="MODEL", help="model directory or Hugging Face name")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="M", help="decode workers (default: 1)")
    parser.add_argument("--backend", default="nixl", choices=_BACKENDS, help="KV transfer backend (default: nixl)")
    add_router_option(parser)
    parser.add_argument(
        "--radix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start decode workers with the prefix cache (default: yes)",
    )
    parser.add_argument(
        "--pegaflow",
        action="store_true",
        help="start a PegaFlow server too, and keep the KV of all workers in it (docs/pegaflow.md)",
    )
    parser.add_argument(
        "--pegaflow-args", default="", metavar="ARGS", help='options for that server, such as "--pool-size 100gb"'
    )
    parser.add_argument("--host", default=HOST, help=f"address the router listens on (default: {HOST})")
    parser.add_argument("--port", type=int, help="port of the router (default: a free one)")
    parser.add_argument(
        "--restart",
        action="store_true",
        help=f"start a process that crashes again, {RESTARTS} times until it has served for {STEADY_S:g} s; without "
        "this, or when that is used up, the deployment ends. A worker that is drained, or exits with status 0, stays "
        "away",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write addresses, pids and log paths there")
    add_log_dir(parser)
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="longest start-up, seconds (default: 600)"
    )
    parser.add_argument("--prefill-args", default="", metavar="ARGS", help="engine options for prefill workers only")
    parser.add_argument("--decode-args", default="", metavar="ARGS", help="engine options for decode workers only")
    parser.add_argument("--router-args", default="", metavar="ARGS", help="options for the router")
    keep_rest(parser, "engine_options")


def decode_options(args: Sequence[str], radix: bool, env: dict[str, str] | None = None) -> list[str]:
    """Options of decode workers, with the prefix cache's flag added if ``radix``."""
    given = has_option(args, RADIX_FLAG, RADIX_ALIAS)
    if given and not radix:
        raise PdRadixError(f"--no-radix and {RADIX_FLAG} contradict each other: give one of them")
    if (given or radix) and not patches_engine(env):
        raise PdRadixError("SGLANG_PD_RADIX=0 switches the prefix cache off: unset it, or add --no-radix")
    return [*args] if given or not radix else [RADIX_FLAG, *args]


def check_model(path: str) -> str:
    """``path``, if it is a model directory or a hosted model's name. Raises PdRadixError."""
    try:
        directory = Path(path).expanduser()
    except RuntimeError as error:
        raise PdRadixError(f"no model at {path}: {error}") from error
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise PdRadixError(f"{path} is not a model: it has no config.json")
        return str(directory)
    if directory.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise PdRadixError(f"no model at {path}: `pd-radix make-model {path}` makes a small one")
    return path


def check_pegaflow() -> None:
    """Raise PdRadixError if no PegaFlow server of the required version can be started here."""
    what = pegaflow_host.trouble()
    if what is not None:
        raise PdRadixError(f"--pegaflow: {what}")


def check_json(path: Path | None) -> None:
    """Raise PdRadixError if the result file ``path`` has no directory, is no regular file, or may not be written."""
    if path is None:
        return
    behind = _behind(path)
    if not behind.parent.is_dir():
        raise PdRadixError(f"--json {path}: there is no directory {behind.parent}")
    # Writing would replace a process's open file.
    if str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/")) or (path.exists() and not path.is_file()):
        raise PdRadixError(f"--json {path}: that is no regular file, give one")
    if not os.access(behind.parent, os.W_OK):
        raise PdRadixError(f"--json {path}: {behind.parent} may not be written to; give another file")


def check_log_dir(path: Path | None) -> None:
    """Create the log directory ``path``. Raises PdRadixError if that fails."""
    try:
        if path:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdRadixError(f"--log-dir {path}: it cannot be made: {error.strerror or error}") from error


def check_port(host: str, port: int | None) -> None:
    """Raise PdRadixError if the router cannot listen there, before workers start."""
    if port is not None and not 1 <= port <= 65535:
        raise PdRadixError(f"--port {port}: give 1 to 65535")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise PdRadixError(f"--host {host}: give an IP address; the router takes no name") from None
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), port or 0, type=socket.SOCK_STREAM)
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except (OSError, ValueError) as error:
        given = f"--host {host}" + ("" if port is None else f" --port {port}")
        raise PdRadixError(f"{given}: {getattr(error, 'strerror', None) or error}") from error


def check_may_switch(who: str, engine_options: Sequence[str]) -> None:
    """Raise PdRadixError if the prefix cache cannot be switched per side, as ``who`` needs."""
    if not patches_engine():
        raise PdRadixError("SGLANG_PD_RADIX=0 switches the prefix cache off: unset it")
    if has_option(engine_options, RADIX_FLAG, RADIX_ALIAS):
        raise PdRadixError(f"{RADIX_FLAG} is what {who} switches: remove it from the engine options")


def check_page_size(options: Sequence[str]) -> None:
    """Raise PdRadixError for a value that the engine would refuse only after the start."""
    given = option_value(options, "--page-size")
    if given is not None and not (given.isdecimal() and int(given) >= 1):
        raise PdRadixError(f"--page-size {given}: must be a whole number of at least 1")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` as `write_whole`."""
    write_whole(path, json.dumps(document, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` atomically; a symbolic link is kept. Raises PdRadixError on failure."""
    path = _behind(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Command-line names need not be UTF-8.
        partial.write_bytes(text.encode(errors="backslashreplace"))
        partial.replace(path)
    except OSError as error:
        raise PdRadixError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _behind(path: Path) -> Path:
    """The target of ``path``'s symbolic links."""
    return Path(os.path.realpath(path))


def check_backend(backend: str, prefill: Sequence[str], decode: Sequence[str]) -> None:
    """Raise PdRadixError if workers with these options cannot transfer over ``backend``."""
    if has_option(prefill, RADIX_FLAG, RADIX_ALIAS):
        raise PdRadixError(f"{RADIX_FLAG} is for decode workers alone, which have it without --no-radix: remove it")
    if backend not in DELTA_BACKENDS and has_option(decode, RADIX_FLAG, RADIX_ALIAS):
        raise PdRadixError(
            f"--backend {backend} has no prefix cache on decode: take {' or '.join(DELTA_BACKENDS)}, or add --no-radix"
        )
    package = {
        "nixl": "nixl",
        "mooncake": mooncake_host.CPU_PACKAGE if cpu_host.active() else mooncake_host.PACKAGE,
        "mori": "mori",
    }.get(backend)
    if package and importlib.util.find_spec(backend) is None:
        raise PdRadixError(f"--backend {backend}: its Python package is not installed; pip install {package}")


def served_name(model: str) -> str:
    """The model's name for clients: the hosted name, or the directory's; the engine's default is the whole path.

    Colons are reserved for adapters (``model:adapter``).
    """
    directory = Path(model)
    return directory.resolve().name.replace(":", "-") if directory.is_dir() else model


def cluster_from(args: argparse.Namespace, **more: Any) -> Cluster:
    """The cluster that the parsed options describe, not yet started; ``more`` goes to `Cluster`.

    Raises PdRadixError for errors that can be found before processes run.
    """
    if not args.timeout > 0:
        raise PdRadixError(f"--timeout {args.timeout:g}: must be above 0")
    # Refuses unknown names, which else each worker would.
    loader.extras()
    check_json(args.json)
    check_log_dir(args.log_dir)
    # The router takes IP addresses only.
    host = HOST if args.host == "localhost" else args.host
    check_port(host, args.port)
    pegaflow = split_options(args.pegaflow_args, "--pegaflow-args")
    if pegaflow and not args.pegaflow:
        raise PdRadixError("--pegaflow-args is for the server that --pegaflow starts: add --pegaflow")
    if args.pegaflow:
        check_pegaflow()
        more["pegaflow"] = pegaflow
    gateway = named_gateway(args.router)
    of_router = split_options(args.router_args, "--router-args")
    if of_router:
        check_options(gateway, of_router)
    common = args.engine_options
    of_prefill = split_options(args.prefill_args, "--prefill-args")
    of_decode = split_options(args.decode_args, "--decode-args")
    for options in (common, of_prefill, of_decode):
        check_page_size(options)
    of_decode = decode_options(of_decode, args.radix)
    check_backend(args.backend, [*common, *of_prefill], of_decode)
    if args.model_path is None:
        raise PdRadixError("--model is missing: give a directory or a name; `pd-radix make-model m` makes a small one")
    model = check_model(args.model_path)
    remembered = {ENDED_REQUESTS: os.environ.get(ENDED_REQUESTS, _REMEMBERED)}
    # User options come later and win.
    common = ["--served-model-name", served_name(model), "--enable-metrics", "--enable-cache-report", *common]
    return Cluster(
        model,
        prefill=args.prefill,
        decode=args.decode,
        common_args=common,
        prefill_args=of_prefill,
        decode_args=of_decode,
        router_args=of_router,
        env=remembered,
        backend=args.backend,
        gateway=gateway,
        host=host,
        port=args.port,
        log_dir=args.log_dir,
        timeout_s=args.timeout,
        **more,
    )


def run(args: argparse.Namespace) -> int:
    """Start it, serve until a signal or a failure, stop it. Returns the exit code."""
    signals: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    def end_if_asked() -> None:
        if signals:
            raise _Ended(signals[0])

    # Handlers only set a mark: an exception between a process's start and its registration would lose it.
    process_group.on_end(note)
    cluster = cluster_from(args, on_progress=Display().startup, on_wait=end_if_asked)
    try:
        cluster.start()
    except _Ended as ended:
        _say("ended while starting; nothing is left running")
        return 128 + ended.signum
    except NotReadyError as error:
        raise PdRadixError(f"{error}; give more time with --timeout if they show progress") from error
    try:
        if args.json:
            write_json(args.json, cluster.describe())
        print("\n".join(_introduction(cluster)), flush=True)
        keeper = Keeper(cluster, args.restart, _say)
        # A signal may also come during a restart.
        with contextlib.suppress(_Ended):
            while not signals:
                if keeper.attend() and args.json:
                    # On a full disk the old file stays.
                    with contextlib.suppress(PdRadixError):
                        write_json(args.json, cluster.describe())
                time.sleep(0.2)
        _say("stopping")
    except OSError as error:
        raise PdRadixError(f"cannot write the addresses: {error.strerror or error}") from error
    finally:
        cluster.stop()
        if args.json:
            with contextlib.suppress(OSError):
                _behind(args.json).unlink()
    _say(f"stopped; logs are in {cluster.log_dir}")
    return 0


def _introduction(cluster: Cluster) -> Iterator[str]:
    """The lines that describe the running deployment and its use."""
    for process in cluster.processes:
        bootstrap = f"  bootstrap {process.bootstrap_port}" if process.bootstrap_port else ""
        yield f"{process.name:<10} {process.url}  pid {process.pid}{bootstrap}  {process.log_path}"
    yield f"ready: {cluster.router_url}"
    decode = next(process.command for process in cluster.processes if process.role == "decode")
    model = option_value(decode, "--served-model-name")
    yield f"model: {model}"
    key = ""
    if cluster.spec.api_key is not None:
        key = f'-H "Authorization: Bearer ${API_KEY}" '
        yield f"key:   export {API_KEY}=...  # the one of --api-key"
    if not has_option(decode, "--skip-tokenizer-init"):
        body = {"model": model, "messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 32}
        url = f"{cluster.router_url}/v1/chat/completions"
        yield f"ask:   curl {url} -H 'Content-Type: application/json' {key}-d {shlex.quote(json.dumps(body))}"
    workers = " ".join(url.partition("//")[2] for url in (*cluster.prefill_urls, *cluster.decode_urls))
    yield f"watch: pd-radix top {workers}"
    yield "end:   Ctrl-C"


def _say(text: str) -> None:
    # The terminal may have been closed.
    with contextlib.suppress(OSError):
        print(f"pd-radix: {text}", file=sys.stderr, flush=True)
