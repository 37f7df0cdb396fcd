"""Which DP rank of a decode worker a request goes to, simulated: what is reused, and how even the load is.

Each rank is a real decode queue, tree, pool and allocator (see ``simulate.py``), and the choice by prefix is the real
one (`sglang.srt.managers.prefix_balance`), which hears of a rank's load when a request ends there, as the engine's
controller does. Ranks step by themselves: what a full rank costs the others with DP attention, where all wait for the
slowest, is not simulated.

    python benchmark/dp_ranks.py --trace conversation_trace.jsonl          # chat and trace, 2 and 4 ranks
    python benchmark/dp_ranks.py --workloads chat --ranks 4 --methods longest_prefix --weights 0,0.1,0.5,2

Methods: ``room`` (bootstrap_room modulo the ranks), ``turns`` (round robin), ``total_tokens`` (the emptiest rank),
``longest_prefix``; and ``one``, the best possible with that memory: one rank with the pools of all. Reused: tokens of
prompts that the rank held. Best: all that any rank was ever asked or answered before, with memory without end. Even:
the tokens that the fullest rank has to hold over the mean of all, both as means over time. Believed: what the choice
took the chosen ranks to hold, over what they held.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import random
import sys
import time
import warnings
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.managers.prefix_balance import FULLNESS_WEIGHT, PrefixBalance, block_numbers  # noqa: E402
from sim.decode import UNIQUE, SimulatedDecode  # noqa: E402
from sim.deployment import Deployment  # noqa: E402
from sim.figures import Evenness, Record  # noqa: E402
from sim.scale import Many, Trace  # noqa: E402
from sim.workload import Request, Workload  # noqa: E402
from simulate import MODES  # noqa: E402

METHODS = ("room", "turns", "total_tokens", "longest_prefix", "one")


def to_hold(decode: SimulatedDecode) -> int:
    """Tokens that a rank reports as its load: those of requests that have memory, and of those in its queues."""
    used = decode.size - decode.allocator.available_size() - decode.tree.evictable_size()
    queued = [dr.req for queue in (decode.queue.queue, decode.transfer.queue) for dr in queue]
    return (used + sum(req.seqlen for req in (*decode.waiting, *decode.queue.retracted_queue, *queued))) * decode.scale


class Ranks(Deployment):
    """A deployment whose decode workers are the ranks of one, and requests go to them by ``method``."""

    def __init__(self, workload: Workload, method: str, weight: float):
        super().__init__(workload, False, MODES["new"])
        self.method = method
        # Of what ranks have to hold.
        self.even, self._looked_at = Evenness(), 0.0
        # Tokens, of all requests: as the choice believed them to be held.
        self.believed = 0
        self.balance = PrefixBalance(len(self.decodes), workload.pool, workload.scale, weight)
        self._rooms = random.Random("rooms")
        self._turn = itertools.cycle(range(len(self.decodes)))
        for rank, decode in enumerate(self.decodes):
            decode.finished = functools.partial(self._finished_on, rank)

    def _choose(self, request: Request) -> int:
        ranks, now = len(self.decodes), self.clock.now
        if self.method == "room":
            return self._rooms.randrange(2**63) % ranks
        if self.method in ("turns", "one"):
            return next(self._turn)
        # The tokens of one slot are all the same, and nobody shares a part of a slot.
        scale = self.workload.scale
        tokens = [slot for slot in request.slots(scale, UNIQUE) for _ in range(scale)][: request.length]
        if self.method == "total_tokens":
            loads = self.balance.loads(now)
            chosen = loads.index(min(loads))
            self.balance.given(chosen, tokens, None, now)
            return chosen
        numbers = list(block_numbers(tokens, None, self.balance.block))
        matches = [held.match(numbers) for held in self.balance.held]
        chosen = self.balance.choose(tokens, None, [True] * ranks, now)
        self.believed += matches[chosen] * self.balance.block
        return chosen

    def _send(self, request: Request) -> None:
        self._look()
        self.prefill_for[id(request)] = p = self.prefill_router.choose(request, self.prefill_loads)
        self.prefill_loads[p] += 1
        self.records.append(self.decodes[self._choose(request)].arrive(request))

    def _finished_on(self, rank: int, record: Record) -> None:
        self._look()
        self.balance.report(rank, to_hold(self.decodes[rank]), self.clock.now)
        self._finished(record)

    def _look(self) -> None:
        passed, self._looked_at = self.clock.now - self._looked_at, self.clock.now
        self.even.take([to_hold(decode) for decode in self.decodes], passed)


def chat(ranks: int, args: argparse.Namespace) -> Workload:
    """Conversations of up to 10 turns under one system prompt, as many at a time as fill half of the pools."""
    return Many(
        decodes=ranks,
        prefills=3,
        documents=1,
        document=1024,
        turns=10,
        requests=args.requests * ranks,
        concurrency=250 * ranks,
        pool=800_000,
    ).make()


def trace(ranks: int, args: argparse.Namespace) -> Workload:
    return Trace(file=args.trace or "", decodes=ranks, limit=args.limit).make()


def together(workload: Workload) -> None:
    """Make one rank of all: with their memory, and as fast as they are together."""
    ranks, workload.decodes = workload.decodes, 1
    workload.pool *= ranks
    workload.max_running *= ranks
    workload.times.step_request /= ranks
    workload.times.step_token /= ranks
    workload.times.bandwidth *= ranks


def measure(name: str, ranks: int, method: str, weight: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run one workload with one method; returns the figures."""
    workload = {"chat": chat, "trace": trace}[name](ranks, args)
    if method == "one":
        together(workload)
    deployment = Ranks(workload, method, weight)
    began = time.process_time()
    figures = deployment.run()
    asked = sum(record.request.length for record in deployment.records)
    held = sum(record.prefix_len for record in deployment.records)
    return {
        "workload": name,
        "ranks": ranks,
        "method": method if method != "longest_prefix" else f"{method}, {weight:g}",
        "reused": held / asked,
        "best": 1 - figures["pages_least"] * workload.scale * workload.page / asked,
        "even": deployment.even.even,
        "believed": deployment.believed / held,
        **{key: figures[key] for key in ("requests", "requests_per_s", "ttft_p50", "ttft_p99", "itl_mean")},
        "cpu_seconds": time.process_time() - began,
    }


HEAD = (
    "| workload | ranks | method | reused | best | even | believed | requests/s | TTFT p50, s | p99 | ITL mean, ms |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(f: dict[str, Any]) -> str:
    believed = f"{f['believed']:.2f}" if f["believed"] else ""
    return (
        f"| {f['workload']} | {f['ranks']} | {f['method']} | {f['reused']:.3f} | {f['best']:.3f} | {f['even']:.2f} "
        f"| {believed} | {f['requests_per_s']:.2f} | {f['ttft_p50']:.2f} | {f['ttft_p99']:.1f} "
        f"| {1e3 * f['itl_mean']:.1f} |"
    )


def main() -> int:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", default="chat,trace")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--weights", default=str(FULLNESS_WEIGHT), help="of longest_prefix: tokens sent per token held")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake-format trace")
    parser.add_argument("--limit", type=int, default=0, help="requests of the trace; 0: all")
    parser.add_argument("--requests", type=int, default=3000, help="of the chat, per rank")
    args = parser.parse_args()
    methods = args.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(METHODS)}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print(HEAD, flush=True)
    for name, ranks in itertools.product(args.workloads.split(","), map(int, args.ranks.split(","))):
        for method in methods:
            for weight in map(float, args.weights.split(",") if method == "longest_prefix" else ["0"]):
                print(row(measure(name, ranks, method, weight, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
