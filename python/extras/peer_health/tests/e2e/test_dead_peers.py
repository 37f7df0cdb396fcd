"""A worker that dies takes its own requests with it, each with a message that says so, and nobody else's (I1, trap 25).

What it was asked for is freed; restarted at the same address it is found again.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import requests
from pd import FLAG, Pair, conversations, words

pytestmark = pytest.mark.timeout(600)

# Seconds, failures and seconds; the engine's own are 5, 2 and 300.
ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "3",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
}


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[FLAG],
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
        env=ENV,
        backend=backend,
    )
    clusters.stop()


def attempt(pair: Pair, ids: list[int], max_new: int = 8) -> list[requests.Response | None]:
    """What prefill and decode say to one request; None from a worker that died meanwhile."""
    body = pair.body(ids, max_new)

    def post(url: str) -> requests.Response | None:
        try:
            return requests.post(url + "/generate", json=body, timeout=100)
        except requests.ConnectionError:
            return None

    first = pair._workers.submit(post, pair.prefill_url)
    second = post(pair.decode_url)
    return [first.result(), second]


@contextmanager
def standing_still(cluster, name: str) -> Iterator[None]:
    """The schedulers of a worker are stopped, and what else answers for it goes on."""
    (worker,) = (process for process in cluster.processes if process.name == name)
    children = psutil.Process(worker.pid).children(recursive=True)
    stopped = [one for one in children if "sglang::scheduler" in " ".join(one.cmdline())]
    assert stopped
    for one in stopped:
        one.send_signal(signal.SIGSTOP)
    yield
    for one in stopped:
        one.send_signal(signal.SIGCONT)


# Of the heartbeats: 2 s three times, 2 s more, 3 s from one to the next, and 1 s for another connection.
SILENT_S = 12


def test_a_prefill_that_stands_still_is_lost_and_is_used_again(cluster, truth):
    """No port of it refuses, and its HTTP server answers."""
    still, other = Pair(cluster, 0, 0), Pair(cluster, 1, 1)
    assert conversations(still) == truth["conversations"]
    rnd = random.Random(7)
    with ThreadPoolExecutor(8) as pool:
        going_on = pool.submit(conversations, other, 6, 1, 5, 96)
        with standing_still(cluster, "prefill-0"):
            bodies, began = [still.body(words(rnd, 300), 8) for _ in range(3)], time.monotonic()
            halves = [still.ask_prefill(body) for body in bodies]
            told = [answer.result() for answer in [still.ask_decode(body) for body in bodies]]
            assert time.monotonic() - began < SILENT_S + 4
        assert all(reply.status_code == 500 and "Losing connection with prefill" in reply.text for reply in told)
        assert not any(half.result().ok for half in halves)
        assert going_on.result() == truth["long"]
    assert conversations(still) == truth["conversations"]
    still.check_idle()


def test_decode_dies(cluster, truth, backend):
    dying, other = Pair(cluster, 1, 1), Pair(cluster, 1, 0)
    assert conversations(dying) == truth["conversations"]
    rnd = random.Random(6)
    with ThreadPoolExecutor(8) as pool:
        going_on = pool.submit(conversations, other, 6, 1, 5, 96)
        # No machine computes all of these prompts in the moment in which decode asks for them, nor one of the answers.
        asked = [pool.submit(attempt, dying, words(rnd, 3000), 600) for _ in range(4)]
        time.sleep(0.3)
        cluster.pause(["decode-1"])
        # These it never asks for. Over NIXL the engine then waits for as long as the client does.
        unasked = [pool.submit(attempt, dying, words(rnd, 300)) for _ in range(3)] if backend == "mooncake" else []
        time.sleep(1)
        cluster.kill("decode-1")
        assert going_on.result() == truth["long"]
        asked, unasked = [lost.result() for lost in asked], [lost.result() for lost in unasked]
    assert all(of_decode is None for _, of_decode in asked + unasked)
    # The first may have been sent before decode stopped to listen, the last not.
    refused = [of_prefill.text for of_prefill, _ in asked if not of_prefill.ok]
    assert refused
    # What the ports say, or the write that failed; over Mooncake every later request is told as well.
    reasons = {"nixl": ["NIXL"], "mooncake": ["Failed to send kv chunk", "Decode instance could be dead"]}[backend]
    reasons.append("is gone: it refuses connections")
    assert all(any(reason in text for reason in reasons) for text in refused), refused
    assert all("timed out after 15" in of_prefill.text for of_prefill, _ in unasked)
    other.check_idle()
    assert conversations(other) == truth["conversations"]

    cluster.restart("decode-1")
    assert conversations(dying) == truth["conversations"]
    dying.check_idle()
