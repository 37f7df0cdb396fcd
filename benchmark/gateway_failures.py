"""What clients behind a gateway are told while a real worker dies, stops, is drained or is ended.

Two prefill and two decode workers with the flag, and a gateway with retries and one with none before them. Eight
clients ask without a pause, half of them for a stream; then one thing happens to a worker, and they go on asking while
it lasts. The next thing comes when the worker is back and the gateway has seen it.

    python benchmark/gateway_failures.py
    python benchmark/gateway_failures.py --router sglang-router --happens prefill-kill,decode-kill

Whole: right answers, those of one engine alone; nobody gets two. Not judged: answers from where two tokens are as
likely on, of which that engine was not asked how they go on. Attempts: requests that came to both prefills, and to
both decodes. Twice: rooms that came to one role more than once. Until: seconds from what happened to the last request
asked that failed. Latest: the longest that anybody waited for his answer or a word.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import deploy, truth
from faults.schedule import CALM, Manner
from faults.traffic import Ask, Clients, Told, trace_asks, wait_answered

from sglang_pd_radix.tools.cluster import Cluster, Process, add_router_option, http, named_gateway
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.progress import print_ready

# Seconds of calm, for which it then lasts, and in which the gateway has to have seen that the worker is back.
CALM_S, LASTS_S, SEEN_S = 3.0, 12.0, 60.0
GATEWAYS = {"retries": (), "none": ("--disable-retries",)}
ROOM = re.compile(r"Receive: obj=.*?\bbootstrap_room=(\d+)")


class Happening:
    """What can happen to a worker: each method begins it, and returns what takes it back where something has to."""

    def __init__(self, cluster: Cluster, gateway_url: str) -> None:
        self.cluster, self.gateway_url = cluster, gateway_url

    def kill(self, worker: Process) -> Callable[[], None]:
        """As a crash or a lost machine."""
        self.cluster.kill(worker.name)
        return lambda: self.cluster.restart(worker.name)

    def stop(self, worker: Process) -> Callable[[], None]:
        """It keeps its connections and says nothing."""
        self.cluster.pause([worker.name])
        return lambda: self.cluster.resume([worker.name])

    def term(self, worker: Process) -> Callable[[], None]:
        """SIGTERM, as an orchestrator sends it, and nobody has told the gateway."""
        ended = threading.Thread(target=self._terminate, args=(worker,))
        ended.start()

        def back() -> None:
            ended.join()
            self.cluster.restart(worker.name)

        return back

    def drain(self, worker: Process) -> Callable[[], None]:
        """`pd-radix drain`, and the worker is ended then."""
        said: list[str] = []
        draining = threading.Thread(target=lambda: said.append(self._drain(worker)))
        draining.start()

        def back() -> None:
            draining.join()
            self._terminate(worker)
            self.cluster.restart(worker.name)
            body: dict[str, Any] = {"url": worker.url, "worker_type": worker.role}
            if worker.role == "prefill":
                body["bootstrap_port"] = worker.bootstrap_port
            status, told = http(self.gateway_url + "/workers", body, 30)
            if said != [""] or status >= 300:
                raise SystemExit(f"drain {worker.name}: {said}; back: {status} {told!r}")

        return back

    def flush(self, worker: Process) -> None:
        deploy.post(worker.url + "/flush_cache?timeout=5", {})

    def _terminate(self, worker: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
        assert worker.popen
        worker.popen.wait(timeout=120)

    def _drain(self, worker: Process) -> str:
        """What it said if it failed."""
        command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "drain", worker.url.removeprefix("http://")]
        command += ["--gateway", self.gateway_url, "--timeout", "60"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""


KINDS = ("kill", "stop", "term", "drain", "flush")
HAPPENS = tuple(f"{role}-{kind}" for kind in KINDS for role in ("prefill", "decode"))


def measure(
    cluster: Cluster, name: str, happens: str, asks: list[Ask], right: truth.Truth, clients: int
) -> dict[str, Any]:
    """One thing that happens to the first worker of a role, behind the gateway of this name."""
    role, kind = happens.split("-")
    worker = next(one for one in cluster.processes if one.name == f"{role}-0")
    url = cluster.router_urls[name]
    seen = {one.name: _size(one) for one in cluster.processes}
    asking = Clients(url + "/generate", asks, 1 << 30, clients, manner, give_up_s=90).start()
    time.sleep(CALM_S)
    happened = time.monotonic()
    back = getattr(Happening(cluster, url), kind)(worker)
    time.sleep(LASTS_S)
    asking.stop()
    if kind == "stop" and back:
        # Who has asked it waits for it.
        back()
        back = None
    asking.join()
    rooms = {of: _rooms(cluster, of, seen) for of in ("prefill", "decode")}
    if back:
        back()
    _wait_seen(cluster, asks)
    return {"gateway": name, "happens": happens, **_told(asking.told, right, happened), **_attempts(rooms)}


def manner(number: int) -> Manner:
    """Half of the clients ask for a stream."""
    return Manner("stream") if number % 2 else CALM


def _size(process: Process) -> int:
    return process.log_path.stat().st_size


def _rooms(cluster: Cluster, role: str, seen: dict[str, int]) -> Counter[str]:
    """How often each room has come to workers of a role since, by their logs."""
    found: Counter[str] = Counter()
    for process in cluster.processes:
        if process.role == role:
            with process.log_path.open("rb") as log:
                log.seek(seen[process.name])
                found.update(ROOM.findall(log.read().decode(errors="replace")))
    # Of health checks.
    del found["0"]
    return found


def _attempts(rooms: dict[str, Counter[str]]) -> dict[str, Any]:
    return {
        "attempts": {role: sum(found.values()) for role, found in rooms.items()},
        "twice": {role: sum(count > 1 for count in found.values()) for role, found in rooms.items()},
    }


def _told(told: list[Told], right: truth.Truth, happened: float) -> dict[str, Any]:
    wrong = truth.problems(told, right)
    not_judged = sum(one.ended_how == "whole" and right.unknown(one) for one in told)
    failed = [one for one in told if one.ended_how != "whole"]
    how = Counter(_how(one) for one in failed)
    return {
        "requests": len(told),
        "whole": len(told) - len(failed) - len(wrong) - not_judged,
        "not_judged": not_judged,
        "wrong": wrong,
        "failed": dict(how),
        "until_s": max((one.began_s - happened for one in failed), default=None),
        "latest_s": max(one.took_s for one in told),
        "errors": sorted({one.error for one in failed})[:20],
    }


def _how(one: Told) -> str:
    if one.status not in (0, 200):
        return str(one.status)
    if one.error == "no word":
        return "no word in 90 s"
    return "broken off" if one.status == 200 else "connection lost"


def _wait_seen(cluster: Cluster, asks: list[Ask]) -> None:
    """Until both gateways have seen it."""
    for url in cluster.router_urls.values():
        if not wait_answered(url, asks[0], SEEN_S):
            raise SystemExit(f"the gateway at {url} has not seen in {SEEN_S:.0f} s that its worker is back")


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    failed = ", ".join(f"{count} x {how}" for how, count in sorted(found["failed"].items())) or "none"
    until = "" if found["until_s"] is None else f"{found['until_s']:.1f}"
    attempts, twice = ([str(found[what][role]) for role in ("prefill", "decode")] for what in ("attempts", "twice"))
    wrong = f", {len(found['wrong'])} WRONG" if found["wrong"] else ""
    wrong += f", {found['not_judged']} not judged" if found["not_judged"] else ""
    return (
        f"| {found['gateway']} | {found['happens']} | {found['requests']} | {found['whole']}{wrong} | {failed} "
        f"| {until} | {found['latest_s']:.1f} | {', '.join(attempts)} | {', '.join(twice)} |"
    )


def main() -> int:
    """Run everything that was asked for and print the table. Returns the exit code: 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--happens", default=",".join(HAPPENS), help="role-kind, comma-separated (default: all)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    add_router_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    unknown = set(args.happens.split(",")) - set(HAPPENS)
    if unknown:
        parser.error(f"--happens: {', '.join(sorted(unknown))}; there are {', '.join(HAPPENS)}")
    gateway = named_gateway(args.router)
    log_dir = Path(tempfile.mkdtemp(prefix="pd-radix-failures-"))
    asks = trace_asks(None, 120, 32, longest=512)
    model = str(make_model(log_dir / "model"))
    right = truth.of_engine_alone(model, asks, args.clients, log_dir, (), print_ready)
    found = []
    with deploy.cluster(
        model,
        args.backend,
        None,
        log_dir,
        options=("--log-requests", "--log-requests-level", "1"),
        router_args=deploy.LOOKS,
        routers={name: (range(2), list(options)) for name, options in GATEWAYS.items()},
        on_progress=functools.partial(print_ready, file=sys.stderr),
        gateway=gateway,
    ) as cluster:
        print(f"{gateway.version}, {args.backend}, {args.clients} clients; logs in {log_dir}")
        print(
            "| gateway | happens | requests | whole | failed | until, s | latest, s | attempts | twice |\n"
            + "|---" * 9
            + "|"
        )
        for happens in args.happens.split(","):
            for name in GATEWAYS:
                found.append(measure(cluster, name, happens, asks, right, args.clients))
                print(line(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"router": gateway.version, "runs": found}, indent=1) + "\n")
    return 1 if any(one["wrong"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
