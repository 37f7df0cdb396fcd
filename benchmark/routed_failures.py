"""What clients of the gateway are answered while workers are killed and come back, with its retries and without.

Two prefill and two decode workers and two gateways before all of them, one of which asks again (its default) and one
that does not. As many clients ask each, all the time. A decode worker and then a prefill worker are killed and started
again.

    python benchmark/routed_failures.py
    python benchmark/routed_failures.py --router sglang-router --away 20

Killed: requests that were on their way then. Away: those sent until the worker is ready again. Back: those after it.
Wrong: whole answers that are not those of before. An answer that a client gets twice would be one too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from sglang_pd_radix.tools.cluster import RADIX_FLAG, Cluster, add_router_option, named_gateway
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.progress import print_ready

OPTIONS = ["--page-size", "16", "--max-total-tokens", "16384", "--max-running-requests", "32"]
GATEWAYS: dict[str, list[str]] = {"retries": [], "no retries": ["--disable-retries"]}
PROMPTS, ANSWER = 12, 48


@dataclass
class Told:
    """One request: when it was sent and answered, on the clock of `time.monotonic`, and with what status and text."""

    prompt: int
    sent_s: float
    told_s: float
    status: str
    text: str


@dataclass
class Clients:
    """``count`` clients that ask one gateway, one request after the other, until told to end."""

    url: str
    count: int
    told: list[Told] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(self.count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, client: int) -> None:
        rnd = random.Random(client)
        while not self._end.is_set():
            prompt = rnd.randrange(PROMPTS)
            self.told.append(ask(self.url, prompt))
            self._end.wait(0.05)


def ask(url: str, prompt: int) -> Told:
    """Ask a gateway one of `PROMPTS` questions."""
    ids = [random.Random(prompt).randrange(400, 1900) for _ in range(100 + 20 * prompt)]
    sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    sent = time.monotonic()
    try:
        reply = requests.post(url + "/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=120)
        status, text = str(reply.status_code), reply.text
        if reply.status_code == 200:
            answer = reply.json()
            text = str(answer["output_ids"])
            # An answer may also say that it was aborted.
            kind = (answer["meta_info"].get("finish_reason") or {}).get("type")
            status = status if kind == "length" else f"200, {kind}"
    except requests.RequestException as error:
        status, text = type(error).__name__, str(error)
    return Told(prompt, sent, time.monotonic(), status, text)


def happen(cluster: Cluster, name: str, away_s: float) -> tuple[float, float]:
    """Kill a worker, and start it again ``away_s`` later; returns when it was killed and when ready again."""
    killed = time.monotonic()
    cluster.kill(name)
    time.sleep(away_s)
    cluster.restart(name)
    return killed, time.monotonic()


def counts(told: list[Told], right: list[str], killed_s: float, back_s: float, over_s: float) -> dict[str, Any]:
    """Of what one gateway's clients were told of one event: statuses by part, wrong answers, seconds of the latest."""
    parts: dict[str, Counter[str]] = {"killed": Counter(), "away": Counter(), "back": Counter()}
    wrong, latest = 0, 0.0
    for one in told:
        if one.told_s < killed_s or one.sent_s > over_s:
            continue
        part = "killed" if one.sent_s < killed_s else "away" if one.sent_s < back_s else "back"
        parts[part][one.status] += 1
        wrong += one.status == "200" and one.text != right[one.prompt]
        latest = max(latest, one.told_s - one.sent_s)
    return {**parts, "wrong": wrong, "latest_s": latest}


def lines(name: str, gateway: str, f: dict[str, Any]) -> str:
    said = [
        ", ".join(f"{n} x {status}" for status, n in sorted(f[part].items())) for part in ("killed", "away", "back")
    ]
    return f"| {name} | {gateway} | {' | '.join(said)} | {f['wrong']} | {f['latest_s']:.1f} |"


def main() -> int:
    """Run everything and print the table; 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--away", type=float, default=8.0, metavar="S", help="until it is started again (default: 8)")
    parser.add_argument(
        "--after", type=float, default=10.0, metavar="S", help="looked at when it is back (default: 10)"
    )
    parser.add_argument("--clients", type=int, default=3, help="of each gateway (default: 3)")
    parser.add_argument("--workers", default="decode-1,prefill-1", help="that are killed (default: decode-1,prefill-1)")
    parser.add_argument("--policy", default="round_robin", help="of the gateways (default: round_robin)")
    add_router_option(parser)
    args = parser.parse_args()
    gateway, wrong = named_gateway(args.router), 0
    with tempfile.TemporaryDirectory(prefix="pd-radix-failures-") as scratch:
        cluster = Cluster(
            str(make_model(Path(scratch) / "model")),
            prefill=2,
            decode=2,
            common_args=OPTIONS,
            decode_args=[RADIX_FLAG],
            routers={name.replace(" ", "-"): (range(2), more) for name, more in GATEWAYS.items()},
            router_args=["--policy", args.policy],
            env={"OMP_NUM_THREADS": "1"},
            gateway=gateway,
            log_dir=Path(scratch) / "logs",
            timeout_s=280,
            on_progress=functools.partial(print_ready, file=sys.stderr),
        )
        with cluster:
            urls = cluster.router_urls
            right = [ask(url, prompt) for url in list(urls.values())[:1] for prompt in range(PROMPTS)]
            assert {one.status for one in right} == {"200"}, right
            print(f"{gateway.version}, {args.policy}", flush=True)
            print("| worker | gateway | killed | away | back | wrong | latest, s |\n" + "|---" * 7 + "|", flush=True)
            for name in args.workers.split(","):
                with contextlib.ExitStack() as stack:
                    asking = {which: stack.enter_context(Clients(url, args.clients)) for which, url in urls.items()}
                    time.sleep(5)
                    killed, back = happen(cluster, name, args.away)
                    time.sleep(args.after)
                    over = time.monotonic()
                for which, clients in asking.items():
                    found = counts(clients.told, [one.text for one in right], killed, back, over)
                    wrong += found["wrong"]
                    print(lines(name, which, found), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
