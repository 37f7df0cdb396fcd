"""Host memory below the trees of decode workers of several ranks, and of other models. With `make test-all`."""

from __future__ import annotations

import random
import threading

import pytest
import requests
from pd import FLAG, TP2, Pair, conversations, counter, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

SMALL = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16", FLAG]
HOST = ["--enable-hierarchical-cache", "--hicache-ratio", "16"]
LOADED = "sglang:decode_host_loaded_tokens_total"


def check(pair: Pair, truth: dict) -> None:
    for _ in range(2):
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
    pair.check_idle()
    assert counter(pair.decode_url, LOADED) > 0


@pytest.mark.parametrize("selective", [False, True])
def test_two_ranks(clusters, model, truth, backend, selective):
    policy = ["--hicache-write-policy", "write_through_selective"] if selective else []
    cluster = clusters.get(
        model,
        decode=1,
        prefill_args=[TP2],
        decode_args=[[*SMALL, *HOST, *TP2, *policy]],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )
    check(Pair(cluster), truth)


@pytest.mark.parametrize("page", ["1", "64"])
def test_other_models(clusters, mla_model, mla_truth, backend, page):
    cluster = clusters.get(
        mla_model,
        decode=1,
        decode_args=[[*SMALL, *HOST]],
        backend=backend,
        common_args=["--page-size", page, "--chunked-prefill-size", "64"],
    )
    check(Pair(cluster), mla_truth)


def test_flushes_and_aborts_between_saves_and_loads(clusters, model, truth, backend):
    """Whatever comes between, nobody reads anything else and nothing is left behind."""
    cluster = clusters.get(
        model,
        decode=1,
        decode_args=[[*SMALL, *HOST]],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )
    pair, rnd = Pair(cluster), random.Random(1)
    stop = threading.Event()

    def ask_and_leave(rid: str) -> None:
        body = pair.body(words(rnd, 200), 64, rid=rid)
        leaving = pair.ask_prefill(body), pair.ask_decode(body)
        stop.wait(0.05)
        for url in (pair.decode_url, pair.prefill_url):
            requests.post(url + "/abort_request", json={"rid": rid}, timeout=10)
        for one in leaving:
            one.result()

    def disturb() -> None:
        while not stop.wait(0.3):
            ask_and_leave(f"gone{rnd.random()}")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(3):
            assert conversations(pair) == truth["conversations"]
    finally:
        stop.set()
        thread.join()
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    pair.check_idle()
