"""``pd-radix join``: add a worker to a gateway once it is ready."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_pd_radix.errors import PdRadixError

from .cluster.local_http import freeze, http, servers_key, status_text
from .operate.reading import TIMEOUT_S, Unheard, addresses, base_url, gateway_workers
from .operate.texts import printable
from .progress import Display

_Come = TypeVar("_Come")

# Seconds between two looks; and time-out of a health check, for which the worker generates a token.
LOOK_S, HEALTH_S = 0.5, 25.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix join``."""
    parser.description = "Wait until a worker is ready, and have the gateway send it requests from then on."
    parser.add_argument("worker", metavar="HOST:PORT", help="a prefill or decode worker, as the gateway reaches it")
    parser.add_argument("--gateway", required=True, metavar="URL", help="the gateway (smg)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="longest wait, seconds (default: 1800)"
    )


def run(args: argparse.Namespace) -> int:
    """Add the worker. Returns the exit code."""
    if not args.timeout > 0:
        raise PdRadixError(f"--timeout is {args.timeout:g}: give a number of seconds above 0")
    (url,) = addresses([args.worker], None, None)
    health = base_url(args.gateway) + "/health"
    deadline = time.monotonic() + args.timeout
    steps = Display()
    steps.now(f"waiting until {url} is ready")
    wait_ready(url, deadline)
    worker = describe(url, deadline)
    wrong = freeze(url)
    steps.done(f"{url} is ready, a {worker['worker_type']} worker" + (wrong and f", but {wrong}"))
    steps.now(f"asking {args.gateway} to take it in")
    # The gateway may be starting together with its workers.
    _until(
        lambda: http(health, timeout=TIMEOUT_S)[0] == 200,
        deadline,
        f"{args.gateway} does not answer: is this the gateway's address, and does it run?",
    )
    enter(args.gateway, worker, deadline)
    steps.done(f"{args.gateway} sends {url} requests")
    return 0


def wait_ready(url: str, deadline: float) -> None:
    """Wait until a worker passes its health check. Raises PdRadixError after ``deadline``."""
    _until(
        lambda: http(url + "/health", timeout=HEALTH_S)[0] == 200,
        deadline,
        f"{url} is not ready: its log says how far it is; give more time with --timeout if that shows progress",
    )


def describe(url: str, deadline: float) -> dict[str, Any]:
    """A gateway's description of a worker, queried from the worker. Raises PdRadixError if it is no PD worker."""

    def answered() -> tuple[int, bytes] | None:
        reply = http(url + "/server_info", timeout=TIMEOUT_S)
        return reply if reply[0] else None

    status, content = _until(answered, deadline, f"{url} does not answer, though its health check did: see its log")
    try:
        info = json.loads(content) if status == 200 else {}
    except (ValueError, RecursionError):
        info = {}
    mode = info.get("disaggregation_mode") if isinstance(info, dict) else None
    if mode not in ("prefill", "decode"):
        said = status_text(status) if mode is None else f"its --disaggregation-mode is {mode}"
        raise PdRadixError(f"{url} is no prefill or decode worker: {said}")
    worker = {"url": url, "worker_type": mode}
    if mode == "prefill":
        worker["bootstrap_port"] = info.get("disaggregation_bootstrap_port")
        if not isinstance(worker["bootstrap_port"], int):
            raise PdRadixError(f"{url} does not report its --disaggregation-bootstrap-port: is it of another version?")
    return worker


def enter(gateway: str, worker: dict[str, Any], deadline: float) -> None:
    """Add a worker to ``gateway`` and wait until it is in use. Raises PdRadixError on failure."""
    url = worker["url"]
    if not _serves(gateway, url):
        # A gateway uses its own key only for workers that it was started with.
        key = servers_key()
        given = worker if key is None else worker | {"api_key": key}
        status, content = http(base_url(gateway) + "/workers", given, TIMEOUT_S)
        # 409: it knows the worker already, and checks it again by itself.
        if status not in (200, 201, 202, 409):
            said = printable(content.decode(errors="replace")[:200])
            raise PdRadixError(f"{gateway} does not take {url}: {status_text(status)} {said}")
    _until(
        lambda: _serves(gateway, url),
        deadline,
        f"{gateway} has been asked to take {url}, and does not use it: does it reach this address?",
    )


def _serves(gateway: str, url: str) -> bool:
    try:
        found = [worker for worker in gateway_workers(gateway) if worker["url"] == url]
    except Unheard:
        return False
    return any(worker.get("is_healthy") and worker.get("status", "ready") == "ready" for worker in found)


def _until(come: Callable[[], _Come | None], deadline: float, otherwise: str) -> _Come:
    """The result of ``come`` once it is true. Raises PdRadixError with ``otherwise`` after ``deadline``."""
    while not (found := come()):
        if time.monotonic() > deadline:
            raise PdRadixError(otherwise)
        time.sleep(LOOK_S)
    return found
