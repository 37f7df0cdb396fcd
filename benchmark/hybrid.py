"""Chats on a hybrid model (linear attention), with the decode radix cache and without, turn about.

Starts a prefill worker and two decode workers, one with the flag, on a made model, and lets clients chat with each pair
in turn, round after round with new words. Prints, as Markdown: KV sent, over the least possible (every page of a prompt
that its chat's earlier turns have not brought or computed, once); states sent, which come with every request either
way; TTFT; with --speculate, as the incremental-transfer proposal's deployment has it (EAGLE, 3 steps, top-k 1, 4 draft
tokens, the draft in the model), also the tokens of a step.

    python benchmark/hybrid.py [--rounds N] [--clients N] [--turns N] [--backend nixl|mooncake] [--page-size N]
                               [--speculate]

Exits with 1 if the answers with the flag and without are not the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import requests

from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster
from sglang_pd_radix.tools.make_model import ModelShape, make_model
from sglang_pd_radix.tools.workers import parse_counters

# Ids of ordinary words in the made vocabulary.
WORDS = range(400, 1900)
COUNTERS = {"kv": "sglang:kv_transfer_sent_bytes_total", "states": "sglang:kv_transfer_state_bytes_total"}
FIRST, MORE, ANSWER = 400, 60, 24
SPECULATE = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
SPECULATE += ["--speculative-num-draft-tokens", "4"]


@dataclass
class Side:
    """What one decode worker's rounds came to. Bytes; seconds."""

    name: str
    decode_url: str
    kv: float = 0
    states: float = 0
    least: float = 0
    ttft: list[float] = field(default_factory=list)
    steps: int = 0
    answers: list[list[int]] = field(default_factory=list)


class Bench:
    def __init__(self, cluster: Cluster, page_size: int, page_bytes: int):
        self.cluster, self.page_size, self.page_bytes = cluster, page_size, page_bytes
        self.prefill_url = cluster.prefill_urls[0]
        self.port = next(p.bootstrap_port for p in cluster.processes if p.role == "prefill")
        self.senders = ThreadPoolExecutor(64)

    def ask(self, side: Side, ids: list[int]) -> tuple[list[int], float, int]:
        """One request, addressed as the router does it: its answer, the time to the first token, and decode's steps."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": random.randrange(1, 2**62),
        }
        began, first, last = time.perf_counter(), None, {}
        prefill = self.senders.submit(requests.post, self.prefill_url + "/generate", json=body, timeout=300)
        with requests.post(
            side.decode_url + "/generate", json={**body, "stream": True}, stream=True, timeout=300
        ) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    last = json.loads(line[6:])
        prefill.result().raise_for_status()
        assert first is not None and len(last["output_ids"]) == ANSWER
        # The first token is prefill's.
        return last["output_ids"], first, last["meta_info"].get("spec_verify_ct", ANSWER - 1)

    def chat(self, side: Side, seed: int, turns: int) -> None:
        rnd = random.Random(seed)
        history: list[int] = []
        for turn in range(turns):
            there = len(history) // self.page_size
            history = history + [rnd.choice(WORDS) for _ in range(FIRST if turn == 0 else MORE)]
            side.least += (-(-len(history) // self.page_size) - there) * self.page_bytes
            answer, ttft, steps = self.ask(side, history)
            side.ttft.append(ttft)
            side.steps += steps
            side.answers.append([seed, turn, *answer])
            history = history + answer

    def counted(self) -> dict[str, float]:
        text = requests.get(self.prefill_url + "/metrics", timeout=30).text
        return parse_counters(text, COUNTERS)

    def round(self, side: Side, number: int, clients: int, turns: int) -> None:
        for url in (self.prefill_url, side.decode_url):
            while requests.post(url + "/flush_cache", timeout=30).status_code != 200:
                time.sleep(0.05)
        before = self.counted()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda client: self.chat(side, 1000 * number + client, turns), range(clients)))
        after = self.counted()
        side.kv += after.get("kv", 0) - before.get("kv", 0)
        side.states += after.get("states", 0) - before.get("states", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    parser.add_argument("--speculate", action="store_true")
    args = parser.parse_args()
    shape = ModelShape(arch="qwen3-next-mtp" if args.speculate else "qwen3-next")
    # The draft has one layer with KV of its own, of the same size.
    layers = shape.layers // 2
    token_bytes = shape.kv_bytes_per_token // layers * (layers + args.speculate)
    options = ["--page-size", str(args.page_size), "--enable-metrics", "--max-mamba-cache-size", "80"]
    options += ["--max-running-requests", "16", *(SPECULATE if args.speculate else [])]
    # Without the flag, a decode worker on a CPU host cannot have it: its steps then take pinned memory. What the engine
    # has in its place beside a radix cache turns overlap off; a decode worker has no such cache, so it is told so.
    extra = ["--mamba-scheduler-strategy", "extra_buffer"]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(f"{folder}/model", shape)
        workers = {"prefill_args": extra, "decode": 2, "decode_args": [[RADIX_FLAG, *extra], ["--disable-radix-cache"]]}
        with Cluster(model, common_args=options, backend=args.backend, **workers) as cluster:
            bench = Bench(cluster, args.page_size, args.page_size * token_bytes)
            on, off = (Side(*side) for side in zip(("on", "off"), cluster.decode_urls, strict=True))
            for number in range(-1, args.rounds):
                for side in (on, off) if number % 2 else (off, on):
                    if number < 0:  # to warm up
                        bench.round(Side(side.name, side.decode_url), number, args.clients, 2)
                    else:
                        bench.round(side, number, args.clients, args.turns)
    print("| flag | KV sent, MiB | over the least possible | states sent, MiB | TTFT p50, ms | tokens of a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for side in (off, on):
        ratio, ttft = side.kv / side.least, 1e3 * statistics.median(side.ttft)
        a_step = len(side.answers) * (ANSWER - 1) / side.steps
        figures = f"{side.kv / 2**20:.1f} | {ratio:.3f} | {side.states / 2**20:.2f} | {ttft:.0f} | {a_step:.2f}"
        print(f"| {side.name} | {figures} |")
    differ = sum(a != b for a, b in zip(sorted(on.answers), sorted(off.answers), strict=True))
    print(f"\n{len(on.answers)} answers of each, {differ} differ.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
