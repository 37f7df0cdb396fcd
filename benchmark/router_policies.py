"""What the policies of a gateway leave workers to reuse: the real gateway before workers that only wait.

The gateway (smg or sglang-router) runs as `pd-radix up` runs it, before prefill and decode workers that note who has
asked them and hold each answer back until it is due. Time is simulated: the next request is sent when the one before
has reached its workers, and an answer is given when all that comes before it has happened, so that the gateway always
sees the requests in flight that it would see, however slow this machine is. Only what it does by the clock goes by
real seconds: it cuts its tree down every second, and asks workers for their load every 2 seconds, which are 10
simulated ones (smg's interval), or fewer on a machine that does not keep pace.

What each worker would have held is found out by the way, with the real decode tree and a pool of the real size. A
request is short text that stands for a long prompt, 8 characters for 64 tokens, and the bound of the gateway's own tree
is made smaller in proportion. With --ranks each decode worker has DP ranks, each with a tree and a pool of its own; the
choice among them is the engine's own (`sglang.srt.managers.prefix_balance`).

    python benchmark/router_policies.py --trace conversation_trace.jsonl      # both gateways, 2 and 4 decode workers
    python benchmark/router_policies.py --workloads chat --workers 4 --policies smg/cache_aware,sglang-router/manual
    python benchmark/router_policies.py --workloads chat --workers 2 --ranks 2 --policies smg/cache_aware
    python benchmark/router_policies.py --workloads chat --prefills 2 --prefill-policies cache_aware,round_robin
    python benchmark/router_policies.py --workloads chat --workers 4 --policies smg/cache_aware --happens

Reused: tokens of prompts that the decode worker, and the rank, held. One: what a single worker would have held that is
asked everything and has the memory of all. Best: all that was ever asked or answered before, with memory without end.
Even: requests at the busiest decode worker over the mean of all, both as means over time. Even, ranks: the same of the
tokens of prompts that run on each DP rank of all workers. With --prefills, the same of prefill workers. With --runs
each line is the mean of several runs, and the least and the greatest; each run of chat has words of its own.

With --happens, and after equal parts of the requests, decode worker 0 is flushed; restarted so quickly that no health
check fails; away, and back with nothing; removed at the gateway, and added again with what it held; another worker is
added; and the gateway is restarted. The figures are those of each part. Elsewhere: tokens that another decode worker
held and the chosen one did not. First: requests that decode worker 0 was sent, over its even share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

from routing_gateway import POLICIES, TUNED, Routing  # noqa: E402
from routing_run import Run  # noqa: E402
from sim.scale import Many, Trace  # noqa: E402
from sim.workload import Workload  # noqa: E402


def chat(workers: int, args: argparse.Namespace, seed: int) -> Workload:
    """Conversations of up to 10 turns under one system prompt."""
    return _conversations(workers, args, seed, document=1024, turns=10, at_a_time=150)


def shared(workers: int, args: argparse.Namespace, seed: int) -> Workload:
    """Two turns at most, of which a system prompt that all share is nearly everything."""
    return _conversations(workers, args, seed, document=12_288, turns=2, at_a_time=100)


def _conversations(
    workers: int, args: argparse.Namespace, seed: int, document: int, turns: int, at_a_time: int
) -> Workload:
    """Conversations under one ``document``, ``at_a_time`` for each worker."""
    return Many(
        decodes=workers,
        documents=1,
        document=document,
        turns=turns,
        requests=args.requests * workers,
        concurrency=at_a_time * workers,
        pool=800_000,
        seed=seed,
    ).make()


def trace(workers: int, args: argparse.Namespace, seed: int) -> Workload:
    """The recorded one, whatever the seed."""
    return Trace(file=args.trace or "", decodes=workers, limit=args.limit).make()


WORKLOADS = {"chat": chat, "shared": shared, "trace": trace}


async def measure(name: str, routing: Routing, args: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Run one workload through a gateway; returns the figures."""
    workload = WORKLOADS[name](routing.decodes * args.ranks, args, seed)
    run = Run(workload, routing.prefills, args.pace, args.ranks, args.rank_method)
    await run.go(routing, args.log, args.happens)
    return run.figures()


# What each kind of table says of a run: names of figures, and of columns.
OF_DECODE = {"reused": "reused", "one": "one", "best": "best", "even": "even", "running": "running, mean"}
TABLES = {
    "decode": OF_DECODE,
    "ranks": {**OF_DECODE, "even_ranks": "even, ranks"},
    "prefill": {"prefill_reused": "reused", "prefill_best": "best", "prefill_even": "even"},
    "parts": {
        "requests": "requests",
        "failed": "failed",
        "reused": "reused",
        "elsewhere": "elsewhere",
        "best": "best",
        "first": "first",
        "even": "even",
    },
}
PRECISE = ("reused", "one", "best", "elsewhere", "prefill_reused", "prefill_best")
WHOLE = ("requests", "failed", "running")


def _cell(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """The mean of a figure, and its least and greatest if there are several runs and they differ."""
    values = [run[name] for run in runs]
    places = 3 if name in PRECISE else 0 if name in WHOLE else 2
    mean, least, most = (f"{value:.{places}f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


def head(kind: str) -> str:
    """The head of a table."""
    columns = ["workload", "workers", "policy", *(["from then on"] if kind == "parts" else []), *TABLES[kind].values()]
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def lines(kind: str, name: str, workers: str, policy: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a table says of runs of one workload, through one gateway."""
    if kind == "parts":
        rows = [([part], [run["parts"][part] for run in runs]) for part in runs[0]["parts"]]
    else:
        rows = [([], runs)]
    return [
        f"| {' | '.join([name, workers, policy, *more, *(_cell(figure, row) for figure in TABLES[kind])])} |"
        for more, row in rows
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", default="chat,trace", help=f"of {', '.join(WORKLOADS)} (default: chat,trace)")
    parser.add_argument("--workers", default="2,4", help="decode workers (default: 2,4)")
    parser.add_argument("--ranks", type=int, default=1, help="DP ranks of each decode worker (default: 1)")
    parser.add_argument("--rank-method", choices=("longest_prefix", "turns"), default="longest_prefix")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"GATEWAY/POLICY[:{'|'.join(TUNED)}], of decode")
    parser.add_argument("--prefills", type=int, default=1, help="prefill workers (default: 1)")
    parser.add_argument("--prefill-policies", default="round_robin", help="of prefill (default: round_robin)")
    parser.add_argument("--happens", action="store_true", help="flush, restart, remove, add and more while it runs")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake-format trace")
    parser.add_argument("--limit", type=int, default=0, help="requests of the trace; 0: all")
    parser.add_argument("--requests", type=int, default=1500, help="of chat and shared, per worker or rank")
    parser.add_argument("--runs", type=int, default=1, help="of each line, which then says how far they differ")
    parser.add_argument("--pace", type=float, default=5.0, help="simulated seconds in a real one, at most (default: 5)")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the gateways")
    return parser.parse_args()


def main() -> int:
    """Run everything that was asked for and print the table."""
    args = parse()
    # The gateway asks each worker first whether it speaks HTTP/2.
    logging.disable(logging.ERROR)
    kind = "parts" if args.happens else "prefill" if args.prefills > 1 else "ranks" if args.ranks > 1 else "decode"
    print(head(kind), flush=True)
    for name, workers in itertools.product(args.workloads.split(","), map(int, args.workers.split(","))):
        for policy, prefill in itertools.product(args.policies.split(","), args.prefill_policies.split(",")):
            routing = Routing.parse(policy, prefill, args.prefills, workers)
            runs = [asyncio.run(measure(name, routing, args, seed)) for seed in range(args.runs)]
            if kind == "prefill":
                said = lines(kind, name, str(args.prefills), f"{routing.gateway}/{prefill}", runs)
            else:
                count = f"{workers} x {args.ranks}, {args.rank_method}" if args.ranks > 1 else str(workers)
                said = lines(kind, name, count, policy, runs)
            print("\n".join(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
