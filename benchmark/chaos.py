"""A PD deployment under fire: what is known to be right when it is calm has to be so while everything goes wrong.

    make chaos                                  # both backends, 10,000 requests each, on a made model
    python benchmark/chaos.py --backend nixl --requests 1000 --seconds 300 --seed 7 --json chaos.json
    python benchmark/chaos.py --trace mooncake_conversation_trace.jsonl ...
    python benchmark/chaos.py --schedule 300 --seed 7             # only say what would be done

Two prefill workers, two decode workers with the flag (overlapped steps) and the router; prefill and decode in network
namespaces of their own, joined by a veth pair, where that is allowed. First a replay of the trace in calm, for its
answers and its pace. Then the same trace again and again, from clients of whom some go away and some read slowly, while
workers are killed and started again, stopped, flushed, paused and given their weights anew, and the link is cut and
slowed. Then everything is left alone, the books are read, and the calm replay is done again.

Exit status 0: every whole answer was the calm one, nobody was told too late, no worker ended by itself, nothing is
held by anybody, and the pace is back.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults import books, deploy, judge
from faults.deploy import Fire
from faults.schedule import Event, Shape, events, manner
from faults.traffic import Ask, Clients, trace_asks

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Cluster, Progress, http
from sglang_pd_radix.tools.make_model import ModelShape, make_model

# Replays after the storm, of which one has to be as fast as the one before.
REPLAYS = 3
# Seconds in which what was done to the workers is undone at the end; a start may take minutes on a busy machine.
UNDONE_S = 240.0
# Seconds in which an idle worker has to have let go of everything; the time-outs of `deploy.ENV` run out in it.
SETTLE_S = 75.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    parser.add_argument("--model", help="model directory (default: a made one)")
    parser.add_argument("--arch", default="qwen3", help="of the made one, as of `pd-radix make-model` (default: qwen3)")
    parser.add_argument("--options", default="", help="of all workers, as one argument: what the model needs")
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace (default: a made one of its shape)")
    parser.add_argument("--requests", type=int, default=10_000, help="of the storm (default: 10000)")
    parser.add_argument("--seconds", type=float, help="end the storm after so many, however many were asked")
    parser.add_argument("--distinct", type=int, default=200, help="of the trace, asked again and again (default: 200)")
    parser.add_argument("--shrink", type=int, default=32, help="lengths of the trace are divided by it (default: 32)")
    parser.add_argument("--clients", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", default="", help="kinds of events to leave out, comma-separated")
    parser.add_argument("--told-within", type=float, default=60.0, metavar="S", help="latest answer (default: 60)")
    parser.add_argument(
        "--longest-step",
        type=float,
        metavar="S",
        help="of decode's queues; for storms that stop no worker (default: any)",
    )
    parser.add_argument("--one-host", action="store_true", help="no network namespaces, and no link to cut")
    parser.add_argument("--log-dir", type=Path, help="default: a new temporary directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--schedule", type=float, metavar="S", help="print the events of S seconds, and do nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(argv)
    shape = Shape(link=not args.one_host, without=frozenset(filter(None, args.without.split(","))))
    if args.schedule:
        for event in itertools.takewhile(lambda event: event.at_s < args.schedule, events(args.seed, shape)):
            print(event)
        return 0
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="pd-radix-chaos-"))
    asks = trace_asks(args.trace, args.distinct, args.shrink, longest=1024)
    report: dict[str, Any] = {"seed": args.seed, "backend": args.backend, "log_dir": str(log_dir), "problems": []}
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with deploy.two_hosts() if not args.one_host else contextlib.nullcontext() as hosts:
            model = args.model or str(make_model(log_dir / "model", ModelShape(args.arch)))
            report["two_hosts"] = hosts is not None
            if hosts is None:
                shape = Shape(link=False, without=shape.without)
            options = shlex.split(args.options)
            cluster = deploy.cluster(model, args.backend, hosts, log_dir, options=options, on_progress=_say)
            with cluster:
                storm(args, shape, cluster, Fire(cluster, hosts, model), asks, report)
    except PdRadixError as error:
        report["problems"].append(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(text(report))
    return 1 if report["problems"] else 0


def _end(signum: int, frame: Any) -> None:
    raise PdRadixError(f"ended by signal {signum} before it was done")


def storm(
    args: argparse.Namespace, shape: Shape, cluster: Cluster, fire: Fire, asks: list[Ask], report: dict[str, Any]
) -> None:
    """Calm, storm, calm; what comes of it goes into ``report`` as it comes, problems too. Raises PdRadixError."""
    problems = report["problems"]
    workers = [process for process in cluster.processes if process.role != "router"]
    # The first pays for memory and kernels that are made once.
    for _ in range(2):
        calm = _replay(cluster, asks, args.clients)
    truth = {told.ask: told.ids for told in calm.told if told.ids is not None}
    if len(truth) < len(asks):
        failed = next(told for told in calm.told if told.ids is None)
        raise PdRadixError(f"{len(asks) - len(truth)} requests failed in calm: {failed.status} {failed.error}")
    before = {worker.name: books.of_idle_worker(worker, 30) for worker in workers}
    report["calm_rate"] = calm.rate
    print(f"calm: {len(asks)} requests, {calm.rate:.2f} answers a second", flush=True)

    clients = Clients(
        cluster.router_url + "/generate",
        asks,
        args.requests,
        args.clients,
        lambda number: manner(args.seed, number),
        give_up_s=2 * args.told_within,
    )
    fire.began_s = time.monotonic()
    clients.start()
    _throw(fire, clients, events(args.seed, shape), args.seconds)
    clients.stop()
    if not fire.join(UNDONE_S):
        problems.append(f"what was done to the workers is not undone after {UNDONE_S:.0f} s")
    if not clients.join(2 * args.told_within + 30):
        problems.append("clients still wait")
    fire.watch()
    problems += fire.problems
    steps = (
        {worker.name: books.pools(worker.url) for worker in workers if worker.role == "decode"} if fire.watch() else {}
    )
    for name, pools in steps.items():
        problems += judge.step_problems(name, pools, args.longest_step)
    report["longest_queue_step_s"] = {
        n: max(p.get("longest_queue_step_s", 0.0) for p in own) for n, own in steps.items()
    }
    problems += judge.answer_problems(clients.told, truth)
    problems += judge.late_problems(clients.told, args.told_within)
    report |= {
        "storm": judge.summary(clients.told) | {"seconds": round(clients.ended_s - clients.began_s, 1)},
        "events": [
            {"event": str(done.event), "began_s": done.began_s, "ended_s": done.ended_s, "outcome": done.outcome}
            for done in fire.done
        ],
        "slowest": [
            {"client": t.number, "manner": t.manner, "took_s": round(t.took_s, 1), "how": t.ended_how,
             "began_s": round(t.began_s - fire.began_s, 1), "error": t.error}
            for t in sorted(clients.told, key=lambda told: -told.took_s)[:12]
        ],
    }  # fmt: skip
    print(_storm_text(report), flush=True)
    if fire.watch():
        _afterwards(args, cluster, fire, asks, truth, before, report)


def _afterwards(
    args: argparse.Namespace,
    cluster: Cluster,
    fire: Fire,
    asks: list[Ask],
    truth: dict[int, tuple[int, ...]],
    before: dict[str, books.Books],
    report: dict[str, Any],
) -> None:
    problems = report["problems"]
    workers = [process for process in cluster.processes if process.role != "router"]
    began = time.monotonic()
    for worker in workers:
        books.wait_idle(worker.url, max(1.0, began + SETTLE_S - time.monotonic()))
    report["idle_after_s"] = round(time.monotonic() - began, 1)
    _wait_for_router(cluster, asks[0])
    rates = []
    while len(rates) < REPLAYS and judge.rate_problems(report["calm_rate"], rates):
        again = _replay(cluster, asks, args.clients)
        rates.append(again.rate)
        problems += judge.answer_problems(again.told, truth)
        lost = [told for told in again.told if told.ids is None]
        if lost:
            problems.append(f"{len(lost)} requests failed after the storm: {lost[0].status} {lost[0].error}")
    problems += judge.rate_problems(report["calm_rate"], rates)
    report["rates_after"] = rates
    after = {worker.name: books.of_idle_worker(worker, 30) for worker in workers}
    for name, own in after.items():
        for pool in own.pools:
            problems += judge.pool_problems(name, pool)
        problems += judge.process_problems(before[name], own, fire.restarts)
    report["books"] = {name: {"before": before[name].document(), "after": after[name].document()} for name in after}


def _throw(fire: Fire, clients: Clients, coming: Any, seconds: float | None) -> None:
    """Carry out events when they are due, until the clients are done, the time is up or a worker is lost."""
    event: Event | None = next(coming, None)
    while clients.busy and fire.watch():
        now = time.monotonic() - fire.began_s
        if seconds is not None and now > seconds:
            return
        if event is not None and now >= event.at_s:
            print(event, flush=True)
            fire.do(event)
            event = next(coming, None)
        time.sleep(0.05)


def _replay(cluster: Cluster, asks: list[Ask], concurrency: int) -> Clients:
    """All requests once, from empty caches."""
    for process in cluster.processes:
        if process.role != "router":
            deadline = time.monotonic() + 30
            while http(process.url + "/flush_cache", {}, 30)[0] != 200 and time.monotonic() < deadline:
                time.sleep(0.2)
    clients = Clients(cluster.router_url + "/generate", asks, len(asks), concurrency).start()
    clients.join()
    return clients


def _wait_for_router(cluster: Cluster, ask: Ask) -> None:
    """Until it has seen that all workers are back: eight answers in a row."""
    deadline, row = time.monotonic() + 60, 0
    while row < 8 and time.monotonic() < deadline:
        clients = Clients(cluster.router_url + "/generate", [ask], 1, 1).start()
        clients.join()
        row = row + 1 if clients.told[0].ended_how == "whole" else 0


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        "",
        f"{report['backend']}, seed {report['seed']}, "
        + ("prefill and decode in namespaces of their own" if report.get("two_hosts") else "all on one host"),
        f"rate: {report.get('calm_rate', 0):.2f} before, "
        + (", ".join(f"{rate:.2f}" for rate in report.get("rates_after", [])) or "none")
        + " after (answers a second)",
    ]
    lines += [_storm_text(report)] if "storm" in report else []
    for name, seconds in report.get("longest_queue_step_s", {}).items():
        lines.append(f"longest step of the queues of {name}: {seconds:.3f} s")
    lines += [f"logs: {report['log_dir']}"]
    lines += [f"WRONG: {problem}" for problem in report["problems"][:40]]
    lines += [] if report["problems"] else ["all is well"]
    return "\n".join(lines)


def _storm_text(report: dict[str, Any]) -> str:
    storm = report["storm"]
    lines = [
        f"storm: {storm['requests']} requests in {storm['seconds']:.0f} s, {len(report['events'])} events; ended: "
        + ", ".join(f"{count} {how}" for how, count in storm["ended"].items()),
        f"told of a failure after (s): {storm['failed_after_s']}, later than 60 s: {storm['failed_later_than_60_s']}",
    ]
    return "\n".join([*lines, *(f"  {count} x {error}" for error, count in storm["errors"].items())])


def _say(progress: Progress) -> None:
    if progress.phase.startswith(("ready", "serving")):
        print(progress, flush=True)


if __name__ == "__main__":
    sys.exit(main())
