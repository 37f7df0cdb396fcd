"""Real chat through the gateway to several decode workers: what they reuse without any header, and what it takes.

One prefill worker and several decode workers with the flag, and three routers before them: ``cache_aware`` (`pd-radix
up`'s default, no header), ``manual`` (each client sends its name as X-SMG-Routing-Key), and ``one``, which knows a
single decode worker and shows what there is to reuse. All hold the same conversations, under one system prompt, by
clients that do not wait for each other; runs take turns, each from empty caches.

    python benchmark/routed_chat.py --decode 2 --runs 3
    python benchmark/routed_chat.py --decode 2 --runs 2 --json build/routed_chat.json -- --dp-size 2 ...

Reused: prompt tokens that decode held, over all. Even: requests that the busiest worker has served, over the mean.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_pd_radix.tools.chat_load import Reply, Workload, stream_chat
from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster, add_router_option, named_gateway
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.progress import print_ready
from sglang_pd_radix.tools.workers import DECODE_COUNTERS, empty_caches, parse_counters

OPTIONS = ["--page-size", "16", "--max-total-tokens", "32768", "--max-running-requests", "32", "--enable-metrics"]
POLICIES = {"cache_aware": ("--decode-policy", "cache_aware"), "manual": ("--decode-policy", "manual"), "one": ()}


@dataclass(frozen=True)
class Chat(Workload):
    """Conversations under a system prompt of ``system`` words that all share."""

    system: int = 200

    def messages(self, client: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """Adds the system prompt."""
        shared = Workload(document=self.system, seed=self.seed).user_text(-1, 0)
        return [{"role": "system", "content": shared}, *super().messages(client, answers)]


def hold(url: str, model: str, chat: Chat, first: int, keyed: bool) -> tuple[list[Reply], float]:
    """All conversations, each as fast as it is answered. first: number of the first client. Replies and seconds.

    Raises ChatError if a request fails.
    """
    replies: list[Reply] = []
    errors: list[BaseException] = []

    def converse(client: int) -> None:
        answers: list[str] = []
        pause = random.Random(f"{chat.seed}/{client}")
        headers = {"X-SMG-Routing-Key": f"client-{client}"} if keyed else {}
        try:
            for _ in range(chat.turns):
                time.sleep(pause.uniform(0, 0.2))
                messages = chat.messages(client, answers)
                replies.append(stream_chat(url, model, messages, chat.answer, headers=headers))
                answers.append(replies[-1].text)
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=converse, args=(first + n,), daemon=True) for n in range(chat.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return replies, time.monotonic() - began


def counters(cluster: Cluster) -> list[dict[str, float]]:
    """Of each decode worker."""

    names = {**DECODE_COUNTERS, "requests": "sglang:num_requests_total"}
    found = []
    for url in cluster.decode_urls:
        reply = requests.get(url + "/metrics", timeout=30)
        found.append(parse_counters(reply.text, names))
    return found


def one_run(cluster: Cluster, name: str, chat: Chat, first: int) -> dict[str, Any]:
    """One run through the router of this name, from empty caches."""
    empty_caches(cluster, [*cluster.prefill_urls, *cluster.decode_urls])
    before = counters(cluster)
    replies, seconds = hold(cluster.router_urls[name], cluster.model_path, chat, first, name == "manual")
    grown = [
        {key: value - old.get(key, 0.0) for key, value in now.items()}
        for old, now in zip(before, counters(cluster), strict=True)
    ]
    prompt = sum(worker.get("prompt_tokens", 0.0) for worker in grown)
    served = [worker.get("prompt_tokens", 0.0) for worker in grown]
    ttfts = sorted(reply.ttft_s for reply in replies)
    return {
        "router": name,
        "requests": len(replies),
        "reused": sum(worker.get("reused_tokens", 0.0) for worker in grown) / prompt,
        "even": max(served) / statistics.mean(served),
        "requests_per_s": len(replies) / seconds,
        "ttft_p50_s": statistics.median(ttfts),
        "ttft_p95_s": ttfts[int(0.95 * len(ttfts))],
    }


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--decode", type=int, default=2, help="decode workers (default: 2)")
    parser.add_argument("--runs", type=int, default=3, help="of each router (default: 3)")
    parser.add_argument("--routers", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    add_router_option(parser)
    parser.add_argument("--decode-args", default="", help="options of decode workers, as one argument")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures there")
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="of all workers")
    args = parser.parse_args()
    chat = Chat(clients=args.clients, turns=args.turns, document=120, question=40, answer=24)
    gateway = named_gateway(args.router)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pd-radix-routed-") as scratch:
        model = str(make_model(Path(scratch) / "model"))
        cluster = Cluster(
            model,
            decode=args.decode,
            common_args=[*OPTIONS, *args.engine_options],
            decode_args=[RADIX_FLAG, *args.decode_args.split()],
            routers={
                name: ([0] if name == "one" else range(args.decode), list(POLICIES[name]))
                for name in args.routers.split(",")
            },
            router_args=["--assignment-mode", "min_load"],
            env={"OMP_NUM_THREADS": "1"},
            backend=args.backend,
            gateway=gateway,
            log_dir=Path(scratch) / "logs",
            on_progress=functools.partial(print_ready, file=sys.stderr),
        )
        with cluster:
            print(f"{gateway.version}, {args.decode} decode workers, {chat.clients} clients of {chat.turns} turns")
            print("| router | reused | even | requests/s | TTFT p50, ms | p95 |\n|---|---|---|---|---|---|", flush=True)
            for number in range(args.runs + 1):
                for name in cluster.router_urls:
                    # Their own words: nothing is known of them.
                    run = one_run(cluster, name, chat, 1000 * (len(found) + 1))
                    found.append({**run, "warm_up": number == 0})
                    if number:
                        print(_line(run), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"router": gateway.version, "decode": args.decode, "runs": found}, indent=1))
    return 0


def _line(run: dict[str, Any]) -> str:
    return (
        f"| {run['router']} | {run['reused']:.3f} | {run['even']:.2f} | {run['requests_per_s']:.1f} "
        f"| {1000 * run['ttft_p50_s']:.0f} | {1000 * run['ttft_p95_s']:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
