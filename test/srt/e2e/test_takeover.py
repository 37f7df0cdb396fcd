"""Prefills that are gone, or late: decode workers that compute prompts themselves lose no request with them."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, Pair, conversations, counter, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

LOCAL, AFTER = "--disaggregation-decode-local-prefill", "--disaggregation-decode-local-prefill-after"
TAKEN = "sglang:decode_taken_over_requests_total"
LATE_S = 3


@pytest.fixture(scope="module")
def cluster(clusters, model, backend):
    """Decode 0 waits for no prefill for more than 3 s; decode 1 has two ranks, and waits."""
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[[FLAG, LOCAL, "auto", AFTER, str(LATE_S)], [FLAG, LOCAL, "auto", "--tp-size", "2"]],
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
        backend=backend,
    )
    clusters.stop()


def answer_of_decode(pair: Pair, ids: list[int], max_new: int = 12) -> requests.Response:
    """What decode says to a request that both workers are sent."""
    body = pair.body(ids, max_new)
    pair.ask_prefill(body)
    return pair.ask_decode(body).result()


@pytest.mark.parametrize("decode", [0, 1], ids=["one rank", "two ranks"])
def test_a_prefill_is_killed_and_every_answer_comes(cluster, decode):
    """Some it has begun to send, some it has not looked at, and some come when it is gone."""
    dying, other = Pair(cluster, 0, decode), Pair(cluster, 1, decode)
    rnd = random.Random(decode)
    prompts = [words(rnd, length) for length in (40, 300, 900, 600, 900, 120)]
    later = [words(rnd, length) for length in (50, 700)]
    right = [other(prompt, 12)["output_ids"] for prompt in prompts + later]
    other.flush(other.decode_url)
    assert conversations(dying, 1, 1)
    before = counter(dying.decode_url, TAKEN)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(answer_of_decode, dying, prompt) for prompt in prompts]
        time.sleep(0.4)
        cluster.kill("prefill-0")
        gone = time.monotonic()
        asked += [pool.submit(answer_of_decode, dying, prompt) for prompt in later]
        replies = [one.result() for one in asked]
    assert [reply.json().get("output_ids") for reply in replies] == right, [reply.text[:300] for reply in replies]
    assert time.monotonic() - gone < 60
    assert counter(dying.decode_url, TAKEN) >= before + len(later)
    other.check_idle()
    cluster.restart("prefill-0")
    assert conversations(dying) == conversations(other)
    dying.check_idle()


def test_a_prefill_that_stands_still_is_not_waited_for(cluster):
    late, other = Pair(cluster, 0, 0), Pair(cluster, 1, 0)
    rnd = random.Random(9)
    prompts = [words(rnd, length) for length in (40, 300, 900)]
    right = [other(prompt, 12)["output_ids"] for prompt in prompts]
    other.flush(other.decode_url)
    assert conversations(late, 1, 1)
    cluster.pause(["prefill-0"])
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda prompt: answer_of_decode(late, prompt), prompts))
        assert [reply.json().get("output_ids") for reply in replies] == right, [reply.text[:300] for reply in replies]
        assert LATE_S <= time.monotonic() - began < LATE_S + 20
    finally:
        cluster.resume()
    # It learns that nobody waits for it any more, and what it may have written to comes back.
    late.check_idle()
    assert conversations(late) == conversations(other)
    late.check_idle()


def test_a_prefill_that_is_busy_answers_its_client_at_once(cluster):
    """Its front is told when decode stops to wait: a gateway that reads both answers goes on with decode's."""
    busy, other = Pair(cluster, 0, 0), Pair(cluster, 1, 0)
    rnd = random.Random(11)
    prompt = words(rnd, 200)
    right = other(prompt, 12)["output_ids"]
    other.flush(other.decode_url)
    assert conversations(busy, 1, 1)
    before = counter(busy.decode_url, TAKEN)
    with ThreadPoolExecutor(8) as pool:
        # For another decode worker, which waits: more than prefill computes in the time.
        elsewhere = [pool.submit(Pair(cluster, 0, 1), words(rnd, 4000), 1) for _ in range(4)]
        time.sleep(0.5)
        body = busy.body(prompt, 12)
        first, second = busy.ask_prefill(body), busy.ask_decode(body)
        assert second.result().json()["output_ids"] == right
        told = first.result()
        assert told.status_code == 200 and told.json()["meta_info"]["finish_reason"]["type"] == "length"
        assert not all(one.done() for one in elsewhere), "prefill was not busy"
        for one in elsewhere:
            one.result()
    assert counter(busy.decode_url, TAKEN) == before + 1
    busy.check_idle()
