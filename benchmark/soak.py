"""Soak: mixed traffic with aborts and slow readers for an hour, and whether anything grows.

    make soak                                             # 60 minutes over NIXL, on a made model
    python benchmark/soak.py --minutes 10 --backend mooncake --json soak.json

One ordinary engine is asked for the right answers, and ends. Then one prefill, one decode worker with the flag
(overlapped steps) and the router. Every few seconds: memory (RSS), descriptors and threads of each worker's processes,
the tokens that requests hold in its pool, and the rooms that its books mention. Exit status 0: every whole answer was
right, none failed, decode's tree was used, nothing grows with the requests served (`faults.growth`), nothing is held at
the end, and no worker ended. What the run was too short to judge is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults import books, deploy, growth, hits, judge, truth
from faults.schedule import manner
from faults.traffic import Ask, Clients, Told, trace_asks
from faults.truth import Truth
from faults.watch import Sample, look

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import add_router_option, named_gateway
from sglang_pd_radix.tools.make_model import make_model

# Rooms in the books, of which some are those of requests under way.
ROOMS = 32


def rooms_problems(samples: Sequence[Sample]) -> list[str]:
    """Workers whose books mention more rooms in the last quarter of the run than in the second."""
    found = []
    end = max((one.at_s for one in samples), default=0.0)
    for worker in sorted({one.worker for one in samples}):
        own = [one for one in samples if one.worker == worker]
        early, late = (
            statistics.median([one.rooms for one in own if begin <= one.at_s <= until] or [0])
            for begin, until in ((end / 4, end / 2), (3 * end / 4, end))
        )
        if late > early + ROOMS:
            found.append(f"{worker}: rooms in its books grew from {early:g} to {late:g}")
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report. Raises PdRadixError."""
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="pd-radix-soak-"))
    model = args.model or str(make_model(log_dir / "model"))
    asks = trace_asks(args.trace, args.distinct, args.shrink, longest=1024)
    right = truth.of_engine_alone(model, asks, args.clients, log_dir, ())
    samples: list[Sample] = []
    problems: list[str] = []
    gateway = named_gateway(args.router)
    made = deploy.cluster(model, args.backend, None, log_dir, prefill=1, decode=1, gateway=gateway)
    with made as cluster:
        workers = [process for process in cluster.processes if process.is_worker]
        url = cluster.router_url + "/generate"
        # What every process pays once.
        Clients(url, asks[: args.clients], args.clients, args.clients).start().join(120)
        before = [books.of_idle_worker(worker, 30) for worker in workers]
        began = time.monotonic()
        clients = Clients(url, asks, 10**9, args.clients, lambda number: manner(args.seed, number)).start()
        while time.monotonic() < began + 60 * args.minutes:
            cluster.check()
            for worker in workers:
                samples.append(look(worker, len(clients.told), time.monotonic() - began, ask_pools=True))
            time.sleep(args.every)
        clients.stop()
        if not clients.join(120):
            problems.append("clients still wait two minutes after the end")
        for worker, own in zip(workers, before, strict=True):
            after = books.of_idle_worker(worker, 60)
            problems += judge.held_at_rest(worker.name, after.pools)
            # What is too much whatever the slope.
            problems += judge.process_problems(own, after, 0)
    return {
        "backend": args.backend, "minutes": args.minutes, "seed": args.seed, "clients": judge.summary(clients.told),
        "rate": round(clients.rate, 2), **verdict(clients.told, asks, args.clients, right, samples, problems),
        "samples": [asdict(one) for one in samples],
    }  # fmt: skip


def verdict(
    told: Sequence[Told], asks: Sequence[Ask], clients: int, right: Truth, samples: Sequence[Sample],
    problems: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What is wrong, beside ``problems``, what was judged, and what was not."""
    grown = growth.judge(samples)
    longest = max(len(ask.ids) + ask.answer + deploy.PAGE for ask in asks)
    held = hits.judge(told, asks, ["decode-0"], max(0, deploy.DECODE_POOL - clients * longest), deploy.PAGE)
    failed = [one for one in told if one.ended_how in ("failed", "aborted")]
    wrong = [*problems, *truth.problems(told, right), *hits.problems("soak", held)]
    wrong += [*growth.problems(grown), *rooms_problems(samples)]
    if failed:
        wrong.append(f"{len(failed)} requests failed: {judge.summary(failed)['errors']}")
    if not any(one.ended_how == "whole" for one in told):
        wrong.append("there was no whole answer")
    ties = truth.tied(told, right)
    return {
        "problems": wrong,
        "not_judged": [*truth.not_judged(told, right), *growth.not_judged(grown), *hits.not_judged("soak", held)],
        "judged": [
            *(f"held by the trees: {one}" for one in held),
            *(f"growth: {one}" for one in grown),
            *([f"{ties} answers go on with the other of two tokens that are as likely"] if ties else []),
        ],
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    ended = ", ".join(f"{count} {how}" for how, count in report["clients"]["ended"].items())
    lines = [f"{report['backend']}, {report['minutes']:g} minutes: {report['clients']['requests']} requests ({ended})"]
    for worker in sorted({one["worker"] for one in report["samples"]}):
        own = [one for one in report["samples"] if one["worker"] == worker]
        first, last = own[len(own) // 4], own[-1]
        told = [f"{name} {first[name]} to {last[name]}" for name in ("rss_kib", "descriptors", "threads", "rooms")]
        lines.append(f"  {worker}, from the first quarter on: " + ", ".join(told))
    lines += report["judged"]
    lines += [f"NOT JUDGED: {what}" for what in report["not_judged"]]
    lines += [f"WRONG: {problem}" for problem in report["problems"][:40]]
    return "\n".join([*lines, judge.verdict(report["problems"], report["not_judged"])])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between samples (default: 5)")
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    add_router_option(parser)
    parser.add_argument("--model", help="model directory (default: a made one)")
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace (default: a made one of its shape)")
    parser.add_argument("--distinct", type=int, default=2000, help="requests of the trace, again and again")
    parser.add_argument("--shrink", type=int, default=32, help="lengths of the trace are divided by it (default: 32)")
    parser.add_argument("--clients", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen there")
    args = parser.parse_args(argv)
    try:
        report = run(args)
    except PdRadixError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(report) + "\n")
    print(text(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
