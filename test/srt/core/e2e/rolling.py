"""Load through a gateway whose every answer is known, while workers are restarted one after the other."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable

import requests
from pd import counter, generate_body, words

from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.cluster.local_http import local_session
from sglang_pd_radix.tools.cluster.process import Process

# Tokens of an answer, enough for a restart to come in the middle of some.
MAX_NEW = 40


def prompts() -> list[list[int]]:
    """Some that share a prefix and some that share none, so that trees are used and refused."""
    rnd = random.Random(17)
    common = words(rnd, 96)
    return [common + words(rnd, rnd.randrange(8, 60)) for _ in range(12)] + [
        words(rnd, rnd.randrange(30, 120)) for _ in range(12)
    ]


class Load:
    """Clients that ask the gateway one prompt after the other, half of them as streams; with ``with``.

    Every second prompt is a new one: those that a decode worker has had go there again, and a worker that has just
    come would get none. failed: what went wrong, with the seconds since the beginning: no answer, or not that of the
    first time. pages: how many, of ``page`` tokens, all answered prompts had that decode did not hold.
    """

    def __init__(self, url: str, clients: int = 4, page: int = 16):
        self.url, self.over, self.began = url, threading.Event(), time.monotonic()
        self.answered, self.failed, self.page, self.pages = 0, [], page, 0
        self.lock = threading.Lock()
        self.prompts = prompts()
        self.truth = [self.ask(prompt, stream=False) for prompt in self.prompts]
        self.threads = [threading.Thread(target=self.talk, args=(n,)) for n in range(clients)]

    def ask(self, prompt: list[int], stream: bool) -> list[int]:
        body = generate_body(prompt, MAX_NEW, stream=stream)
        reply = requests.post(self.url + "/generate", json=body, timeout=100)
        if not reply.ok:
            raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:300]}")
        lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        last = json.loads(lines[-1][6:]) if stream else reply.json()
        if last["meta_info"]["finish_reason"]["type"] != "length":
            raise RuntimeError(f"it ended: {last['meta_info']['finish_reason']}")
        held = (last["meta_info"].get("cached_tokens_details") or {}).get("decode_prefix", 0)
        with self.lock:
            self.pages += -(-(len(prompt) - held) // self.page)
        return last["output_ids"]

    def talk(self, n: int) -> None:
        rnd = random.Random(n)
        while not self.over.is_set():
            which = rnd.randrange(2 * len(self.prompts))
            new = which >= len(self.prompts)
            try:
                answer = self.ask(words(rnd, 100) if new else self.prompts[which], stream=bool(n % 2))
                right = new or answer == self.truth[which]
                wrong = None if right else f"prompt {which}: {answer} is not {self.truth[which]}"
            except Exception as e:
                wrong = repr(e)
            if wrong is None:
                self.answered += 1
            else:
                self.failed.append(f"{time.monotonic() - self.began:.1f} s: {wrong}")

    def wait_answers(self, count: int) -> None:
        """Return when that many more have come."""
        before = self.answered
        wait(lambda: self.answered >= before + count, 120)

    def __enter__(self) -> Load:
        self.began = time.monotonic()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def wait(what: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def named(cluster: Cluster, name: str) -> Process:
    return next(process for process in cluster.processes if process.name == name)


def known(cluster: Cluster) -> dict[str, dict]:
    """What the gateway says of its workers, by their addresses."""
    with local_session() as session:
        found = session.get(cluster.router_url + "/workers", timeout=30).json()
    return {worker["url"]: worker for worker in found["workers"]}


def take_in(cluster: Cluster, process: Process) -> None:
    """Have the gateway take a worker in, with the command."""
    assert cli.main(["join", process.url, "--gateway", cluster.router_url, "--timeout", "60"]) == 0


def join(cluster: Cluster, process: Process) -> None:
    """The same, and wait until it is used."""
    take_in(cluster, process)
    wait_used(process)


def wait_used(process: Process, seconds: float = 120) -> None:
    """Return when it has been sent some requests that are nobody's checks."""

    def served() -> float:
        return counter(process.url, "sglang:num_requests_total")

    before = served()
    wait(lambda: served() >= before + 3, seconds)
