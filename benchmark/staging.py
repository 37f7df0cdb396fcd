"""What staging buffers are worth between different TP sizes, over Mooncake.

    python benchmark/staging.py [--requests N] [--prompt N] [--prefill-tp N] [--decode-tp N]

One decode worker with the flag and staging buffers, and two prefill workers, one with and one without. New prompts go
to the two in turns, one at a time; the first half of each was answered before, so that decode holds it. Printed is the
time that prefill says a transfer took, from the last chunk computed to its end, and the time to the first token, in
milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time

import requests

from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.workers import parse_counters

STAGING = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "256"}
PAGE = 16


def transfers(url: str) -> tuple[float, int]:
    """Milliseconds of all transfers of this prefill, summed over its ranks, and their number; when it is idle."""
    found: list[tuple[float, int]] = []
    while len(found) < 2 or found[-1] != found[-2]:
        time.sleep(0.2)
        text = requests.get(url + "/metrics", timeout=30).text
        sums = parse_counters(text, {part: f"sglang:kv_transfer_latency_ms_{part}" for part in ("sum", "count")})
        found.append((sums.get("sum", 0.0), int(sums.get("count", 0))))
    return found[-1]


def ask(cluster: Cluster, prefill: int, ids: list[int], port: int) -> float:
    """Seconds until the first token."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": random.randrange(1, 2**62),
    }
    began = time.perf_counter()
    other = threading.Thread(
        target=requests.post, args=(cluster.prefill_urls[prefill] + "/generate",), kwargs={"json": body, "timeout": 300}
    )
    other.start()
    requests.post(cluster.decode_urls[0] + "/generate", json=body, timeout=300).raise_for_status()
    taken = time.perf_counter() - began
    other.join()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="to each prefill (default: 10)")
    parser.add_argument("--prompt", type=int, default=2048, metavar="N", help="tokens (default: 2048)")
    parser.add_argument("--prefill-tp", type=int, default=1, metavar="N")
    parser.add_argument("--decode-tp", type=int, default=2, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            str(make_model(f"{folder}/model")),
            prefill=2,
            prefill_args=["--tp-size", str(args.prefill_tp)],
            prefill_env=[STAGING, {}],
            decode_args=[RADIX_FLAG, "--tp-size", str(args.decode_tp)],
            decode_env=STAGING,
            common_args=["--page-size", str(PAGE), "--max-total-tokens", "65536", "--enable-metrics"],
            backend="mooncake",
        )
        with cluster:
            ports = [process.bootstrap_port for process in cluster.processes if process.role == "prefill"]
            took: list[list[float]] = [[], []]
            first: list[list[float]] = [[], []]
            for number in range(args.requests + 1):
                for prefill in (0, 1):
                    ids = [random.randrange(300, 4000) for _ in range(args.prompt)]
                    ask(cluster, prefill, ids[: args.prompt // 2], ports[prefill] or 0)
                    before = transfers(cluster.prefill_urls[prefill])
                    seconds = ask(cluster, prefill, ids, ports[prefill] or 0)
                    after = transfers(cluster.prefill_urls[prefill])
                    if number:  # the first ones set up connections
                        took[prefill].append((after[0] - before[0]) / (after[1] - before[1]))
                        first[prefill].append(1e3 * seconds)
    print(f"prefill TP {args.prefill_tp}, decode TP {args.decode_tp}, {args.prompt} tokens, half of them on decode")
    for name, times, tokens in zip(("with staging", "without"), took, first, strict=True):
        print(
            f"{name}: transfer {statistics.median(times):.1f} ms ({min(times):.1f}–{max(times):.1f}), "
            f"TTFT {statistics.median(tokens):.0f} ms ({min(tokens):.0f}–{max(tokens):.0f})"
        )


if __name__ == "__main__":
    main()
