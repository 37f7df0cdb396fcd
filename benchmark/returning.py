"""Conversations that come back: more of them than decode's pool holds, with their KV in host memory and without.

    python benchmark/returning.py --runs 3
    python benchmark/returning.py --clients 24 --turns 4 --prefill-pool 16384 --json returning.json
    python benchmark/returning.py --sides "off,tree and host,write_through_selective"

One prefill and a decode worker for each side: the flag off, on, on with --enable-hierarchical-cache, and that with
another --hicache-write-policy (only with --sides). Each client has a
conversation of its own, and a round is one turn of every client, so that before a conversation comes back all others
have passed through the pool: the least recently used is always the one that is wanted next. The sides take turns, in
every other run the other way round, with the same requests; answers must be the same.

KV sent / least: the least is what a decode worker needs that forgets nothing, in pages.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from local_prefill import Side, Told, words

from sglang_pd_radix.tools.bench.stats import percentile
from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.workers import server_info

SIDES = ("off", "tree", "tree and host", "write_through_selective")
# Tokens: of a first message, of a question, of an answer.
DOCUMENT, QUESTION, ANSWER = 1000, 60, 64
PAGE = 16


def run(side: Side, seed: int, clients: int, turns: int, at_once: int) -> dict[str, Any]:
    """One run of one side: seconds of each turn, by round, and what was sent."""
    side.flush()
    sent = side.sent_bytes()
    chances = [random.Random(f"{seed}/{client}") for client in range(clients)]
    histories = [words(rnd, DOCUMENT) for rnd in chances]
    rounds: list[list[Told]] = []
    least_pages = 0
    held = [0] * clients
    cpu = [side.cpu_s(process) for process in (side.prefill, side.decode)]
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(turns):
            for client, history in enumerate(histories):
                least_pages += -(-len(history) // PAGE) - held[client] // PAGE
                # Of the last token of an answer no KV has been computed.
                held[client] = len(history) + ANSWER - 1
            told = list(pool.map(lambda history: side.ask(history, ANSWER), histories))
            rounds.append(told)
            histories = [
                history + one.tokens + words(rnd, QUESTION)
                for history, one, rnd in zip(histories, told, chances, strict=True)
            ]
    cpu = [side.cpu_s(p) - was for p, was in zip((side.prefill, side.decode), cpu, strict=True)]
    later = [one for told in rounds[1:] for one in told]
    pool_state = server_info(side.decode.url)["internal_states"][0]["kv_pool"]
    return {
        "ttft": [one.ttft for one in later],
        "ttft_by_turn": [statistics.median(one.ttft for one in told) for told in rounds],
        "gaps": [gap for one in later for gap in one.gaps],
        "sent_bytes": side.sent_bytes() - sent,
        "least_pages": least_pages,
        "cpu_s": cpu,
        "host": pool_state.get("host"),
        "audit": pool_state.get("audit"),
        "answers": [[one.tokens for one in told] for told in rounds],
    }


def row(name: str, runs: Sequence[dict[str, Any]], page_bytes: float) -> str:
    """A line of the table: medians over runs of each run's figures."""

    def middle(of: Any) -> float:
        return statistics.median(of(one) for one in runs)

    cells = [
        middle(lambda one: one["sent_bytes"] / page_bytes / one["least_pages"]),
        middle(lambda one: one["sent_bytes"] / 2**20),
        1000 * middle(lambda one: percentile(one["ttft"], 50)),
        1000 * middle(lambda one: percentile(one["ttft"], 99)),
        1000 * middle(lambda one: statistics.fmean(one["gaps"])),
        middle(lambda one: one["cpu_s"][0]),
        middle(lambda one: one["cpu_s"][1]),
    ]
    return f"| {name} | " + " | ".join(f"{cell:.2f}" if cell < 20 else f"{cell:.0f}" for cell in cells) + " |"


def measure(sides: dict[str, Side], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All runs of all sides, by name, and their table."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for n in range(args.runs + 1):
        for name in list(sides) if n % 2 else reversed(sides):
            # The first warms the workers up.
            one = run(sides[name], n, args.clients if n else args.at_once, args.turns if n else 2, args.at_once)
            if n:
                runs[name].append(one)
                print(f"# run {n}, {name}: host {one['host']}, audit {one['audit']}", flush=True)
    # Bytes of a page, from what off sends: every page of every prompt.
    prompts = sum(-(-(DOCUMENT + turn * (ANSWER + QUESTION)) // PAGE) for turn in range(args.turns)) * args.clients
    page_bytes = statistics.median(one["sent_bytes"] for one in runs["off"]) / prompts
    print("| side | KV sent / least | KV, MiB | TTFT p50, ms | p99 | ITL mean, ms | prefill CPU, s | decode CPU, s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in runs:
        print(row(name, runs[name], page_bytes), flush=True)
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        default=list(SIDES[:3]),
        help=f"which, and off with them (default: {','.join(SIDES[:3])})",
    )
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=4, help="requests under way (default: 4)")
    parser.add_argument("--pool", type=int, default=16384, help="tokens of decode's pool (default: 16384)")
    parser.add_argument("--prefill-pool", type=int, default=131072, help="tokens of prefill's (default: 131072)")
    parser.add_argument("--ratio", type=float, default=6.0, help="host memory over decode's pool (default: 6)")
    parser.add_argument("--decode-options", default="", help="more options of both decode workers with the flag")
    parser.add_argument("--options", default="", help="more options of all workers")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--model", help="default: a made one")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    if args.sides[0] != SIDES[0] or not set(args.sides) <= set(SIDES):
        parser.error(f"--sides: off first, and of the others some: {', '.join(SIDES)}")
    model = args.model or str(make_model(Path(tempfile.mkdtemp()) / "model"))
    common = ["--enable-metrics", "--page-size", str(PAGE), "--chunked-prefill-size", "2048", *args.options.split()]
    pool = ["--max-total-tokens", str(args.pool)]
    on = [*pool, RADIX_FLAG, *args.decode_options.split()]
    host = [*on, "--enable-hierarchical-cache", "--hicache-ratio", str(args.ratio)]
    policies = ([*host, "--hicache-write-policy", name] for name in SIDES[3:])
    of_side = dict(zip(SIDES, (pool, on, host, *policies), strict=True))
    options: dict[str, Any] = {
        "decode": len(args.sides),
        "decode_args": [of_side[name] for name in args.sides],
        "prefill_args": ["--max-total-tokens", str(args.prefill_pool)],
        "common_args": common,
        "backend": args.backend,
    }
    with Cluster(model, **options) as cluster:
        runs = measure({name: Side(cluster, i) for i, name in enumerate(args.sides)}, args)
    if args.json:
        args.json.write_text(json.dumps(runs))
    same = all([one["answers"] for one in side] == [one["answers"] for one in runs["off"]] for side in runs.values())
    sound = not any(one["audit"] for side in runs.values() for one in side)
    print("All answers are the same." if same else "ANSWERS DIFFER between the sides.")
    if not sound:
        print("AN AUDIT FOUND FAULTS.")
    return 0 if same and sound else 1


if __name__ == "__main__":
    sys.exit(main())
