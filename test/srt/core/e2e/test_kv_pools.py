"""KV in fp8, and a prefill that keeps what it evicts in host memory, with the flag on decode."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, Pair, ask, conversations, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

PAGE = 16
PROMPTS = [words(random.Random(seed), 190 + 7 * seed) for seed in range(10)]
# Less than the prompts together; in host memory there is room for all: of prompts asked in turn the one that has gone
# for want of room is always the next to be asked.
SMALL = ["--enable-hierarchical-cache", "--max-total-tokens", "1024", "--hicache-ratio", "4"]
# The prompts, and not many answers more.
DECODE = [FLAG, "--max-total-tokens", "3072", "--num-reserved-decode-tokens", "16"]


# fp8 and the hierarchical cache each by itself, and together.
@pytest.fixture(scope="module", params=["fp8_e4m3+host", "fp8_e4m3", "fp8_e5m2", "auto+host"])
def cell(request):
    return request.param


@pytest.fixture(scope="module")
def options(cell):
    return ["--page-size", str(PAGE), "--kv-cache-dtype", cell.split("+")[0]]


@pytest.fixture(scope="module")
def truth(clusters, model, options):
    send = ask(clusters.get(model, aggregated=True, common_args=options).router_url)
    return {"talk": conversations(send), **{i: send(prompt, 12)["output_ids"] for i, prompt in enumerate(PROMPTS)}}


@pytest.fixture
def pair(clusters, model, options, cell, truth):
    more = SMALL if "host" in cell else []
    pair = Pair(clusters.get(model, prefill_args=more, decode_args=DECODE, common_args=options))
    pair.flush()
    yield pair
    pair.check_idle()


def test_conversations(pair, truth):
    assert conversations(pair) == truth["talk"]


def test_bytes_are_those_of_the_type(pair, truth, cell):
    details = [pair(PROMPTS[0], 12)["meta_info"]["cached_tokens_details"] for _ in range(2)]
    whole = len(PROMPTS[0]) // PAGE * PAGE
    assert [d["decode_prefix"] for d in details] == [0, whole]
    page_bytes = details[0]["transferred_bytes"] // (len(PROMPTS[0]) // PAGE + 1)
    assert details[1]["transferred_bytes"] == page_bytes and details[1]["saved_bytes"] == whole // PAGE * page_bytes
    # The made model: 4 layers with 8 KV heads of 64 dimensions, K and V.
    assert page_bytes == PAGE * 4 * 8 * 64 * 2 * (1 if "fp8" in cell else 4)


def test_what_prefill_has_to_load_back_is_sent(pair, truth, cell):
    """Round by round; decode forgets everything between the first two, so prefill sends from what it loads back."""
    on_host = 0
    for round_ in range(3):
        if round_ == 1:
            pair.flush(pair.decode_url)
        for i, prompt in enumerate(PROMPTS):
            body = pair.body(prompt, 12)
            first = pair._workers.submit(requests.post, pair.prefill_url + "/generate", json=body, timeout=120)
            answer = requests.post(pair.decode_url + "/generate", json=body, timeout=120).json()
            assert answer["output_ids"] == truth[i]
            held = answer["meta_info"]["cached_tokens_details"]["decode_prefix"]
            assert held == (len(prompt) // PAGE * PAGE if round_ == 2 else 0)
            # None where prefill had nothing of it.
            on_host += (first.result().json()["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
    assert (on_host > 0) == ("host" in cell)


def test_many_at_once(pair, truth):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: pair(PROMPTS[i % 10], 12)["output_ids"], range(40)))
    assert answers == [truth[i % 10] for i in range(40)]


def test_retracted_requests_come_back(pair, truth):
    """More answers than decode's pool holds: requests are retracted, and their KV goes to host memory and back."""
    with ThreadPoolExecutor(12) as pool:
        long = list(pool.map(lambda i: pair(PROMPTS[i % 10], 250), range(14)))
    assert sum(answer["meta_info"]["total_retractions"] for answer in long) > 0
    assert [answer["output_ids"][:12] for answer in long] == [truth[i % 10] for i in range(14)]
