"""Prefill reads the KV that it lacks from decode's pages: a long turn after short ones is computed from there on.

With `make test-all`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, TP2, Answer, Pair, ask, counter, tp_cluster, wait_idle, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

READ, LOCAL = ["--disaggregation-prefill-read-decode", "64"], "--disaggregation-decode-local-prefill"
TOKENS, READS = "sglang:prefill_read_tokens_total", "sglang:prefill_reads_total"
PAGE, TURNS, DOCUMENT, QUESTION, LONG, ANSWER = 16, 12, 200, 20, 300, 16


def chat(send, client: int, turns: int = TURNS) -> list[tuple[list[int], dict]]:
    """Each turn's prompt and reply; the last turn is a long one."""
    rnd = random.Random(f"reading/{client}")
    history, found = words(rnd, DOCUMENT), []
    for turn in range(turns):
        reply = send(history, ANSWER)
        found.append((history, reply))
        new = LONG if turn == turns - 2 else QUESTION
        history = history + reply["output_ids"] + words(rnd, new)
    return found


def answers(found: list[tuple[list[int], dict]]) -> list[Answer]:
    return [reply["output_ids"] for _, reply in found]


class Watched(Pair):
    """Keeps what prefill says of the last request."""

    def __call__(self, ids: list[int], max_new: int = 16, **more) -> dict:
        body = self.body(ids, max_new, **more)
        first = self.ask_prefill(body)
        reply = requests.post(self.decode_url + "/generate", json=self.decode_body(body), timeout=120)
        reply.raise_for_status()
        self.prefill_meta = first.result().json()["meta_info"]
        return reply.json()


@pytest.fixture(scope="module")
def told(clusters, model) -> list[list[Answer]]:
    """What the engine without disaggregation says."""
    send = ask(clusters.get(model, aggregated=True, common_args=["--page-size", str(PAGE)]).router_url)
    return [answers(chat(send, client)) for client in range(3)]


@pytest.fixture(scope="module")
def cluster(clusters, model, told):
    """Of each worker one with a rank and one with two; decode computes short turns, prefill reads them from it."""
    workers = [[*READ], [*READ, *TP2]]
    decode = [[FLAG, LOCAL, "auto"], [FLAG, LOCAL, "auto", *TP2]]
    return tp_cluster(clusters, model, "nixl", prefill_args=workers, decode_args=decode)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def pair(cluster, request):
    pair = Watched(cluster, request.param - 1, request.param - 1)
    pair.flush()
    yield pair
    pair.check_idle()


def test_a_long_turn_after_short_ones(pair, told):
    before = counter(pair.prefill_url, TOKENS)
    found = chat(pair, 0)
    assert answers(found) == told[0]
    history, reply = found[-1]
    held = reply["meta_info"]["cached_tokens_details"]["decode_prefix"]
    # All that decode held, and prefill had the document.
    assert held >= len(history) - LONG - PAGE
    assert pair.prefill_meta["cached_tokens"] == held
    read = counter(pair.prefill_url, TOKENS) - before
    assert held - DOCUMENT <= read <= held - DOCUMENT // PAGE * PAGE + PAGE
    # What was read stays: the next turn but one finds it there.
    wait_idle(pair.prefill_url)
    assert pair(history, 1)["output_ids"] == told[0][-1][:1]
    assert counter(pair.prefill_url, TOKENS) - before == read


def test_several_at_once(pair, told):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda client: answers(chat(pair, client)), range(3)))
    assert found == told


def test_another_tp_size_is_not_read(cluster, told):
    pair = Watched(cluster, 1, 0)
    pair.flush()
    before = counter(pair.prefill_url, READS)
    assert answers(chat(pair, 1)) == told[1]
    assert counter(pair.prefill_url, READS) == before
    pair.check_idle()
