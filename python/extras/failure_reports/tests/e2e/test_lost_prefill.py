"""A prefill that is killed while requests are at every stage: nobody else notices, and its clients are told at once.

With the engine's own heartbeat, which takes ten seconds and more; `test_every_state.py` walks the stages one by one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, Ask, Pair, ask, conversations, words

from sglang_pd_radix.tools.cluster import Cluster

pytestmark = pytest.mark.timeout(600)

# What the operating system needs to end the processes, and a scheduler's step, on two busy cores.
SOON_S = 4
LOCAL = "--disaggregation-decode-local-prefill"
SHORT = 40


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend) -> Iterator[Cluster]:
    # A pool in which not all of them have room, so that some wait for memory. Decode 1 computes short prompts itself.
    on = [FLAG, "--max-total-tokens", "4096", LOCAL]
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[[*on, "off"], [*on, "auto"]],
        common_args=["--page-size", "16", "--chunked-prefill-size", "256"],
        backend=backend,
    )
    clusters.stop()


class Clients:
    """Requests without a break to one pair, and when each was told what."""

    def __init__(self, pair: Pair, count: int, computes: bool) -> None:
        """computes: whether its decode worker computes short prompts itself."""
        self.pair, self.computes, self.stop = pair, computes, threading.Event()
        # When it began, when it was answered, and how; and whether decode may have computed all of it.
        self.answers: list[tuple[float, float, int, str]] = []
        self.without_prefill: list[tuple[float, float, int, str]] = []
        self.pool = ThreadPoolExecutor(2 * count)
        self.jobs = [self.pool.submit(self._talk, seed) for seed in range(count)]

    def _talk(self, seed: int) -> None:
        rnd = random.Random(seed)
        while not self.stop.is_set():
            length = rnd.choice([SHORT, 300, 1500])
            body = self.pair.body(words(rnd, length), rnd.choice([2, 40]))
            self.pool.submit(self._half, body)
            began = time.monotonic()
            reply = requests.post(self.pair.decode_url + "/generate", json=body, timeout=100)
            here = self.computes and length == SHORT and reply.ok
            answers = self.without_prefill if here else self.answers
            answers.append((began, time.monotonic(), reply.status_code, reply.text))
            time.sleep(0 if reply.ok else 0.3)

    def _half(self, body: dict) -> None:
        try:
            requests.post(self.pair.prefill_url + "/generate", json=body, timeout=100)
        except requests.RequestException:
            pass

    def end(self) -> None:
        self.stop.set()
        for job in self.jobs:
            job.result()


def test_a_prefill_is_killed_under_load(cluster, truth):
    dying = [Pair(cluster, 0, decode) for decode in range(2)]
    other: Ask = ask(cluster.router_url)
    going_on = Pair(cluster, 1, 0)
    for pair in (*dying, going_on):
        assert conversations(pair) == truth["conversations"]
    clients = [Clients(pair, 8, computes) for pair, computes in zip(dying, (False, True), strict=True)]
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(conversations, going_on, 6, 1, 5, 96)
        time.sleep(4)
        killed = time.monotonic()
        cluster.kill("prefill-0")
        gone = time.monotonic()
        time.sleep(6)
        for one in clients:
            one.end()
        assert long.result() == truth["long"]
    answers = [answer for one in clients for answer in one.answers]
    caught = [answer for answer in answers if answer[0] < killed < answer[1]]
    later = [answer for answer in answers if answer[0] > gone]
    assert len([a for a in caught if a[2] == 500]) > 4 and len(later) > 16
    told = [ended - max(gone, began) for began, ended, status, _ in caught + later if status != 200]
    assert max(told) < SOON_S, sorted(told)[-5:]
    for _, _, status, text in caught + later:
        assert status in (200, 500) and (status == 200 or "is gone" in text or "Losing connection" in text), text
    assert not any(status == 200 for _, _, status, _ in later)

    # Both decode workers live, hold nothing that is not accounted for, and serve those who ask the other prefill.
    going_on.check_idle()
    Pair(cluster, 1, 1).check_idle()
    assert conversations(going_on) == truth["conversations"]

    # smg looks for prefixes, and without health checks asks the one that is gone for as long as that may hold one.
    cluster.restart("prefill-0")
    assert other(words(random.Random(3), 300), 4)["output_ids"]
    for pair in dying:
        assert conversations(pair) == truth["conversations"]
        pair.check_idle()
