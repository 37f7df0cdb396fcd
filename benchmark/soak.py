"""Soak: mixed traffic with aborts and slow readers for an hour, and whether anything grows.

    make soak                                             # 60 minutes over NIXL, on a made model
    python benchmark/soak.py --minutes 10 --backend mooncake --json soak.json --plot docs/report
    python benchmark/soak.py --add soak.json --plot DIR   # the charts of an earlier run

One prefill, one decode worker with the flag (overlapped steps) and the router. Every few seconds: memory (RSS),
descriptors and threads of each worker's processes, the tokens that requests hold in its pool, and the rooms that its
books mention. Exit status 0: none of these grows from the second quarter of the run to the last (`GROWTH`), nothing is
held at the end, and no worker ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults import books, deploy, judge
from faults.schedule import manner
from faults.traffic import Clients, trace_asks

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import bench
from sglang_pd_radix.tools.make_model import make_model

COLORS = ("#2563eb", "#dc2626")
# What a median may grow by: a part of it, and so much besides. Memory in KiB; the allocator of the C library keeps what
# it has once had, and a trace has longer prompts later on.
GROWTH = {"rss_kib": (0.03, 16384), "descriptors": (0.0, 8), "threads": (0.0, 8), "rooms": (0.0, 32)}


def sample(process: Any, began: float) -> dict[str, Any]:
    """What one worker holds now. Raises PdRadixError if it does not answer."""
    own = books.of_worker(process)
    return {
        "at_s": round(time.monotonic() - began, 1),
        "worker": own.name,
        "rss_kib": own.rss_kib,
        "descriptors": own.descriptors,
        "threads": own.threads,
        "held": sum(pool["size"] - pool["available"] - pool["evictable"] for pool in own.pools),
        "rooms": sum(sum(pool["rooms"].values()) for pool in own.pools),
    }


def growth(samples: Sequence[dict[str, Any]]) -> list[str]:
    """What has grown from the second quarter of the run to the last, by its median."""
    found = []
    end = max(one["at_s"] for one in samples)
    for worker in sorted({one["worker"] for one in samples}):
        own = [one for one in samples if one["worker"] == worker]
        early = [one for one in own if end / 4 <= one["at_s"] < end / 2]
        late = [one for one in own if one["at_s"] >= 3 * end / 4]
        for name, (part, more) in GROWTH.items():
            before = statistics.median(one[name] for one in early)
            after = statistics.median(one[name] for one in late)
            if after > before * (1 + part) + more:
                found.append(f"{worker}: {name} grew from {before:g} to {after:g}")
    return found


def charts(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The charts by the names of their files."""
    chart = bench.package("chart")
    found = {}
    for name, title, label, scale in (
        ("rss", "Memory of each worker", "RSS, MiB", 1 / 1024),
        ("descriptors", "Open descriptors of each worker", "descriptors", 1.0),
        ("held", "KV that requests hold", "tokens", 1.0),
        ("rooms", "Rooms that the books mention", "entries", 1.0),
    ):
        key = "rss_kib" if name == "rss" else name
        lines = [
            chart.Line(worker, color, [(o["at_s"] / 60, o[key] * scale) for o in samples if o["worker"] == worker])
            for worker, color in zip(sorted({o["worker"] for o in samples}), COLORS, strict=False)
        ]
        found[f"soak-{name}"] = chart.Chart(title, "minutes", label, lines)
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report. Raises PdRadixError."""
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="pd-radix-soak-"))
    model = args.model or str(make_model(log_dir / "model"))
    asks = trace_asks(args.trace, args.distinct, args.shrink, longest=1024)
    samples: list[dict[str, Any]] = []
    problems: list[str] = []
    made = deploy.cluster(model, args.backend, None, log_dir, prefill=1, decode=1)
    with made as cluster:
        workers = [process for process in cluster.processes if process.role != "router"]
        url = cluster.router_url + "/generate"
        # What every process pays once.
        Clients(url, asks[: args.clients], args.clients, args.clients).start().join(120)
        began = time.monotonic()
        clients = Clients(url, asks, 10**9, args.clients, lambda number: manner(args.seed, number)).start()
        while time.monotonic() < began + 60 * args.minutes:
            cluster.check()
            samples += [sample(worker, began) for worker in workers]
            time.sleep(args.every)
        clients.stop()
        if not clients.join(120):
            problems.append("clients still wait two minutes after the end")
        for worker in workers:
            for pool in books.wait_idle(worker.url, 60):
                problems += judge.pool_problems(worker.name, pool)
    told = judge.summary(clients.told)
    problems += growth(samples)
    if told["ended"].get("failed"):
        problems.append(f"{told['ended']['failed']} requests failed: {told['errors']}")
    return {
        "backend": args.backend, "minutes": args.minutes, "seed": args.seed, "clients": told,
        "rate": round(clients.rate, 2), "problems": problems, "samples": samples,
    }  # fmt: skip


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    ended = ", ".join(f"{count} {how}" for how, count in report["clients"]["ended"].items())
    lines = [f"{report['backend']}, {report['minutes']:g} minutes: {report['clients']['requests']} requests ({ended})"]
    for worker in sorted({one["worker"] for one in report["samples"]}):
        own = [one for one in report["samples"] if one["worker"] == worker]
        first, last = own[len(own) // 4], own[-1]
        told = [f"{name} {first[name]} to {last[name]}" for name in ("rss_kib", "descriptors", "threads", "rooms")]
        lines.append(f"  {worker}, from the first quarter on: " + ", ".join(told))
    lines += [f"WRONG: {problem}" for problem in report["problems"]] or ["nothing grows"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between samples (default: 5)")
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    parser.add_argument("--model", help="model directory (default: a made one)")
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace (default: a made one of its shape)")
    parser.add_argument("--distinct", type=int, default=2000, help="requests of the trace, again and again")
    parser.add_argument("--shrink", type=int, default=32, help="lengths of the trace are divided by it (default: 32)")
    parser.add_argument("--clients", type=int, default=8, help="at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write the charts there")
    parser.add_argument("--add", type=Path, metavar="FILE", help="take an earlier run's --json instead of running")
    args = parser.parse_args(argv)
    if args.plot:
        bench.package("chart").check_libraries()
    try:
        report = json.loads(args.add.read_text()) if args.add else run(args)
    except PdRadixError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(report) + "\n")
    if args.plot:
        args.plot.mkdir(parents=True, exist_ok=True)
        for name, drawn in charts(report["samples"]).items():
            (args.plot / f"{name}.svg").write_text(drawn.picture())
    print(text(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
