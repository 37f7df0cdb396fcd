"""Chats on decode workers that compute short remainders of prompts themselves, beside such that ask prefill for them.

    python benchmark/local_prefill.py --runs 3
    python benchmark/local_prefill.py --only busy --runs 3 --local 64 --json local.json
    python benchmark/local_prefill.py --only alternating --turns 13 --long-every 12 --read 64

One prefill and three decode workers: the flag off, on, and on with --disaggregation-decode-local-prefill. With --read,
one more of each: the last as before, and a prefill that reads from it. The sides take turns, in every other run the
other way round, with the same requests; answers must be the same.

* idle: chats alone.
* busy: other clients send long prompts to the same prefill, for another decode worker.
* beside: other requests decode on the same worker; the gaps between their tokens are what a step over a prompt costs.
* alternating: every third turn (--long-every) brings many tokens, which are prefill's, and with them what decode has
  computed since.

Both workers are asked at once, as a gateway does, and the first token counts when prefill has answered too: a gateway
hands on decode's answer only then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests
from faults.traffic import WORDS

from sglang_pd_radix.tools.bench.stats import percentile
from sglang_pd_radix.tools.chat_local import LOCAL_FLAG
from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.workers import PREFILL_COUNTERS, empty_caches, parse_counters

SIDES = ("off", "on", "local", "read")
READ_FLAG = "--disaggregation-prefill-read-decode"
# Tokens: of a first message, of a question, of a long one, of an answer.
DOCUMENT, QUESTION, LONG, ANSWER = 400, (40, 60), 600, 32
# Prompts of those that keep prefill busy, and how many there are; answers of those that decode beside.
BUSY_PROMPT, BUSY_CLIENTS, BESIDE, BESIDE_ANSWER = 3500, 2, 8, 4000
TIMEOUT_S = 300


@dataclass
class Told:
    """One answer: when its tokens came, monotonic seconds, and which they are."""

    asked_at: float
    prefill_at: float = 0.0
    token_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token, as behind a gateway."""
        return max(self.token_at[0], self.prefill_at) - self.asked_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.token_at, self.token_at[1:], strict=False)]


class Side:
    """A prefill and one decode worker of the cluster."""

    def __init__(self, cluster: Cluster, decode: int, prefill: int = 0):
        self._cluster = cluster
        workers = {role: [p for p in cluster.processes if p.role == role] for role in ("prefill", "decode")}
        self.prefill, self.decode = workers["prefill"][prefill], workers["decode"][decode]
        self._threads = ThreadPoolExecutor(64)

    def ask(self, ids: list[int], answer: int, stop: threading.Event | None = None) -> Told:
        """Ask both workers. stop: ends it early, with what has come."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
            "bootstrap_host": urlsplit(self.prefill.url).hostname,
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": random.randrange(1, 2**62),
        }
        told = Told(time.monotonic())
        joined: Future = self._threads.submit(self._ask_prefill, body, told)
        url = self.decode.url + "/generate"
        with requests.post(url, json=body | {"stream": True}, stream=True, timeout=TIMEOUT_S) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    told.tokens = json.loads(line[6:])["output_ids"]
                    told.token_at += [now] * (len(told.tokens) - len(told.token_at))
                if stop is not None and stop.is_set():
                    break
        joined.result()
        return told

    def _ask_prefill(self, body: dict[str, Any], told: Told) -> None:
        reply = requests.post(self.prefill.url + "/generate", json=body, timeout=TIMEOUT_S)
        reply.raise_for_status()
        told.prefill_at = time.monotonic()

    def flush(self) -> None:
        empty_caches(self._cluster, [self.prefill.url, self.decode.url])

    def cpu_s(self, process: Any) -> float:
        """CPU seconds of a worker so far, children included."""
        root = psutil.Process(process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in (root, *root.children(recursive=True)))

    def sent_bytes(self) -> float:
        text = requests.get(self.prefill.url + "/metrics", timeout=30).text
        return parse_counters(text, PREFILL_COUNTERS).get("sent_bytes", 0.0)


def words(rnd: random.Random, count: int) -> list[int]:
    return [rnd.choice(WORDS) for _ in range(count)]


def chat(side: Side, client: int, turns: int, seed: int, long_every: int) -> list[Told]:
    """One conversation, turn by turn, of which one in ``long_every`` brings many tokens; 0 for none."""
    rnd = random.Random(f"{seed}/{client}")
    history, told = words(rnd, DOCUMENT), []
    for turn in range(turns):
        told.append(side.ask(history, ANSWER))
        new = LONG if turn + 1 in long_turns(turns, long_every) else rnd.randint(*QUESTION)
        history = history + told[-1].tokens + words(rnd, new)
    return told


def long_turns(turns: int, long_every: int) -> range:
    """Which turns bring many tokens."""
    return range(long_every - 1, turns, long_every) if long_every else range(0)


@contextmanager
def noise(case: str, side: Side, other: Side, seed: int):
    """What goes on beside the chats; yields the answers whose gaps count."""
    stop, told, threads = threading.Event(), [], []

    def busy(client: int) -> None:
        rnd = random.Random(f"busy/{seed}/{client}")
        while not stop.is_set():
            other.ask(words(rnd, BUSY_PROMPT), 1)

    def beside(client: int) -> None:
        told.append(side.ask(words(random.Random(f"beside/{seed}/{client}"), 64), BESIDE_ANSWER, stop))

    for client in range({"busy": BUSY_CLIENTS, "beside": BESIDE}.get(case, 0)):
        threads.append(threading.Thread(target=busy if case == "busy" else beside, args=(client,)))
        threads[-1].start()
    if threads:
        time.sleep(3)
    try:
        yield told
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def run(case: str, side: Side, other: Side, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run of one side; seconds, bytes, and the answers."""
    clients, turns = args.clients, args.turns
    long_every = args.long_every if case == "alternating" else 0
    side.flush()
    with noise(case, side, other, seed) as beside:
        cpu, sent = [side.cpu_s(p) for p in (side.prefill, side.decode)], side.sent_bytes()
        with ThreadPoolExecutor(clients) as pool:
            chats = list(pool.map(lambda c: chat(side, c, turns, seed, long_every), range(clients)))
        cpu = [side.cpu_s(p) - was for p, was in zip((side.prefill, side.decode), cpu, strict=True)]
        sent = side.sent_bytes() - sent
    later = [told.ttft for one in chats for told in one[1:]]
    long = [one[turn].ttft for one in chats for turn in long_turns(turns, long_every)]
    gaps = [gap for told in beside for gap in told.gaps if told.token_at]
    return {
        "ttft": later,
        "ttft_by_turn": [statistics.median(one[turn].ttft for one in chats) for turn in range(turns)],
        "ttft_long": long,
        "gaps": gaps,
        "prefill_cpu_s": cpu[0],
        "decode_cpu_s": cpu[1],
        "sent_mib": sent / 2**20,
        "answers": [[told.tokens for told in one] for one in chats],
    }


def row(case: str, side: str, runs: list[dict[str, Any]]) -> str:
    """A line of the table: medians over runs of each run's figures."""

    def middle(of: Any) -> float:
        return statistics.median(of(one) for one in runs)

    cells = [
        1000 * middle(lambda one: percentile(one["ttft"], 50)),
        1000 * middle(lambda one: percentile(one["ttft"], 99)),
        1000 * middle(lambda one: percentile(one["ttft_long"], 50)) if case == "alternating" else float("nan"),
        1000 * middle(lambda one: statistics.fmean(one["gaps"] or [float("nan")])),
        1000 * middle(lambda one: percentile(one["gaps"], 99)),
        middle(lambda one: one["prefill_cpu_s"]),
        middle(lambda one: one["decode_cpu_s"]),
        middle(lambda one: one["sent_mib"]),
    ]
    return f"| {case} | {side} | " + " | ".join("" if c != c else f"{c:.1f}" for c in cells) + " |"


def measure(cluster: Cluster, count: int, args: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs of ``count`` sides by case and side, printed as they come."""
    names = SIDES[:count]
    sides = [Side(cluster, i, int(name == "read")) for i, name in enumerate(names)]
    # Who keeps a side's prefill busy has another decode worker.
    others = [Side(cluster, 0 if i else 1, int(name == "read")) for i, name in enumerate(names)]
    print(
        "| case | side | TTFT p50, ms | p99 | long turns p50 | ITL of others mean, ms | p99 "
        "| prefill CPU, s | decode CPU, s | KV, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = {}
    for case in args.only.split(","):
        runs: dict[str, list] = {name: [] for name in names}
        for n in range(args.runs + 1):
            for i in sorted(range(len(names)), reverse=n % 2 == 0):
                one = run(case, sides[i], others[i], n, args)
                if n:
                    # The first warms the workers up.
                    runs[names[i]].append(one)
        for name in names:
            print(row(case, name, runs[name]), flush=True)
        found[case] = runs
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="idle,busy,beside,alternating", help="cases, comma-separated")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--local", default="auto", help=f"value of {LOCAL_FLAG} (default: auto)")
    parser.add_argument("--read", type=int, help=f"value of {READ_FLAG} of a fourth side (default: no such side)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--long-every", type=int, default=3, help="of alternating (default: 3)")
    parser.add_argument("--page", type=int, default=16, help="--page-size (default: 16)")
    parser.add_argument("--options", default="", help="more options of all workers")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--model", help="default: a made one")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(argv)
    model = args.model or str(make_model(Path(tempfile.mkdtemp()) / "model"))
    common = ["--enable-metrics", "--max-total-tokens", "65536", "--page-size", str(args.page)]
    common += ["--chunked-prefill-size", "2048", *args.options.split()]
    local = [RADIX_FLAG, LOCAL_FLAG, args.local]
    workers: dict[str, Any] = {"decode_args": [[], [RADIX_FLAG, LOCAL_FLAG, "off"], local], "prefill_args": [[]]}
    if args.read:
        workers = {"decode_args": [*workers["decode_args"], local], "prefill_args": [[], [READ_FLAG, str(args.read)]]}
    workers |= {role: len(workers[f"{role}_args"]) for role in ("prefill", "decode")}
    workers |= {"common_args": common, "backend": args.backend}
    with Cluster(model, **workers) as cluster:
        found = measure(cluster, workers["decode"], args)
    if args.json:
        args.json.write_text(json.dumps(found))
    same = all(
        [a["answers"] for a in side] == [b["answers"] for b in runs["off"]]
        for runs in found.values()
        for side in runs.values()
    )
    print("All answers are the same." if same else "ANSWERS DIFFER between the sides.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
