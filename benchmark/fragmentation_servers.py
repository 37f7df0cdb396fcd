"""The same question as fragmentation.py asked of real servers: runs per request as prefill counts what it sends.

One prefill and two decode workers over real transfers, the first decode without a stock of free pages; a small made
model and a decode pool that holds about a tenth of what is asked. Each decode worker gets the same conversations, one
after the other. Prints Markdown.

    python benchmark/fragmentation_servers.py [--backend mooncake] [--page 1] [--requests 600]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_pd_radix.cluster import RADIX_FLAG, Cluster, http
from sglang_pd_radix.make_model import make_model

POOL, CLIENTS = 8192, 6


def counter(url: str, name: str) -> float:
    """A Prometheus counter of one worker, summed over its labels."""
    lines = http(url + "/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def talk(urls: list[str], port: int, seed: int, turns: int) -> tuple[int, int, int]:
    """One conversation; returns requests, tokens sent and tokens of prompts."""
    rnd = random.Random(seed)
    history = [rnd.randrange(400, 1900) for _ in range(rnd.randrange(150, 500))]
    sent = prompts = 0
    for _ in range(turns):
        sampling = {"temperature": 0, "max_new_tokens": rnd.randrange(8, 60), "ignore_eos": True}
        body = {"input_ids": history, "sampling_params": sampling, "bootstrap_host": "127.0.0.1"}
        body |= {"bootstrap_port": port, "bootstrap_room": rnd.randrange(2**62)}
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(lambda url, body=body: http(url + "/generate", body, 120), urls))
        if any(status != 200 for status, _ in replies):
            raise RuntimeError(f"a request failed: {replies}")
        answer = json.loads(replies[1][1])
        sent += answer["meta_info"]["cached_tokens_details"]["transferred"]
        prompts += len(history)
        history = history + answer["output_ids"] + [rnd.randrange(400, 1900) for _ in range(rnd.randrange(5, 60))]
    return turns, sent, prompts


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="mooncake", help="default: mooncake")
    parser.add_argument("--page", type=int, default=1, help="page size, tokens (default: 1)")
    parser.add_argument("--requests", type=int, default=600, help="per decode worker (default: 600)")
    args = parser.parse_args()
    turns = 5
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        size = ["--page-size", str(args.page), "--max-total-tokens"]
        cluster = Cluster(
            model,
            decode=2,
            common_args=["--enable-metrics", "--max-running-requests", "16"],
            prefill_args=[*size, str(4 * POOL)],
            decode_args=[RADIX_FLAG, *size, str(POOL), "--num-reserved-decode-tokens", "64"],
            decode_env=[{"SGLANG_DISAGGREGATION_DECODE_FREE_STOCK": "0"}, {}],
            backend=args.backend,
            log_dir=Path(folder) / "logs",
        )
        print(f"{args.backend}, pages of {args.page}, decode pool of {POOL} tokens\n")
        print("| stock | conversations | requests | held by decode | pages sent per request | runs | pages per run |")
        print("|---|---|---|---|---|---|---|")
        with cluster:
            prefill, port = cluster.prefill_urls[0], cluster.processes[0].bootstrap_port
            assert port is not None
            for decode, name in zip(cluster.decode_urls, ("none", "1/16"), strict=True):
                urls = [prefill, decode]
                step = max(CLIENTS, args.requests // turns // 6)
                for first in range(0, args.requests // turns, step):
                    before = counter(prefill, "sglang:kv_transfer_runs_total")
                    with ThreadPoolExecutor(CLIENTS) as pool:
                        done = list(
                            pool.map(lambda n, urls=urls: talk(urls, port, n, turns), range(first, first + step))
                        )
                    runs = counter(prefill, "sglang:kv_transfer_runs_total") - before
                    count, sent, prompts = (sum(column) for column in zip(*done, strict=True))
                    pages = sent / args.page
                    print(
                        f"| {name} | {first + 1} to {first + step} | {count} | {1 - sent / prompts:.0%} "
                        f"| {pages / count:.0f} | {runs / count:.1f} | {pages / runs:.1f} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
