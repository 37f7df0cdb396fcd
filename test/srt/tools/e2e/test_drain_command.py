"""All workers of a deployment are drained, ended and started anew, one after the other, under load through the gateway:
no client is told of it.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from pd import FLAG, check_idle
from rolling import Load, join, known, named, take_in, wait

from sglang_pd_radix.tools.cluster.local_http import local_session

pytestmark = [pytest.mark.timeout(1800), pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster(clusters, model):
    yield clusters.get(
        model, prefill=2, decode=2, decode_args=[FLAG], common_args=["--page-size", "16"], backend="nixl"
    )
    clusters.stop()


def drain(cluster, process, *, end: bool = True) -> float:
    """Drain a worker with the command, and end it, or leave it empty; returns the seconds that this took."""
    command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "drain", process.url]
    command += ["--gateway", cluster.router_url, "--timeout", "60", *(["--pid", str(process.pid)] if end else ())]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if end:
        wait(lambda: process.returncode() is not None)
    wait(lambda: process.url not in known(cluster))
    return time.monotonic() - began


def test_the_gateway_finds_the_worker_that_has_a_conversation(cluster):
    """By the prompt alone, as `up` runs it. By turns, three conversations would change workers each time."""
    histories = [" ".join(f"client {client} says {number}" for number in range(40)) for client in range(3)]
    with local_session() as session:
        for turn in range(4):
            for client, history in enumerate(histories):
                body = {"text": history, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
                told = session.post(cluster.router_url + "/generate", json=body, timeout=60).json()
                meta = told["meta_info"]
                held = (meta.get("cached_tokens_details") or {}).get("decode_prefix", 0)
                assert held > meta["prompt_tokens"] / 2 or not turn, (turn, client, meta)
                histories[client] = history + told["text"] + f" and then {turn}"


def test_a_rolling_restart_loses_no_request(cluster):
    with Load(cluster.router_url) as load:
        load.wait_answers(8)
        for name in ("decode-1", "prefill-1", "decode-0", "prefill-0"):
            process, before = named(cluster, name), load.answered
            drained = drain(cluster, process)
            assert load.answered > before and not load.failed, load.failed[:3]
            began = time.monotonic()
            cluster.restart(name)
            ready = time.monotonic() - began
            join(cluster, process)
            used = time.monotonic() - began - ready
            print(f"{name}: drained and ended in {drained:.1f} s, ready {ready:.1f} s later, used after {used:.1f} s")
            load.wait_answers(8)
            assert not load.failed, load.failed[:3]
        print(f"{load.answered} answers")
    assert not load.failed, load.failed[:3]
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        check_idle(url)


KEY = "of the workers"


def test_a_worker_with_a_key_comes_back(clusters, model):
    """A gateway gives its key to the workers that it was started with, and to no other."""
    cluster = clusters.get(
        model, decode=2, decode_args=[FLAG], common_args=["--page-size", "16", "--api-key", KEY], backend="nixl"
    )

    def answer() -> str:
        with local_session() as session:
            body = {"text": "one two three", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            reply = session.post(cluster.router_url + "/generate", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["text"]

    before, process = answer(), named(cluster, "decode-0")
    drain(cluster, process)
    cluster.restart("decode-0")
    take_in(cluster, process)
    # So that there is no other.
    drain(cluster, named(cluster, "decode-1"))
    assert answer() == before
    clusters.stop()
