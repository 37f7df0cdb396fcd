"""A prefill of two pipeline stages: each skips what decode holds, of its own layers, in its own cursor.

The oracle's tests, with a model of five layers: no stage has a number of them that divides it.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import requests
from e2e_fixtures import aggregated_answers
from oracle_of_all import *  # noqa: F403
from pd import FLAG, TP2, Pair, base_prompt, conversations, counter, log_of, words
from test_oracle import (  # noqa: F401
    test_a_cold_herd_is_computed_and_sent_once,
    test_health_checks_leave_nothing,
    test_samples_of_a_prompt,
    test_weight_update_leaves_no_stale_kv,
)
from test_verify_pages import MISMATCHES, VERIFY

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

LAYERS = 5
STAGES = ["--pp-size", "2", "--chunked-prefill-size", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "five", ModelShape(layers=LAYERS)))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "other-five", ModelShape(layers=LAYERS), seed=1))


@pytest.fixture(scope="module")
def truth(clusters, model):
    return aggregated_answers(clusters, model)


@pytest.fixture(scope="module")
def page():
    return 16


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    """Decode 0 has the flag, decode 1 has not, decode 2 verifies what it is sent. Chunks are of 64 tokens."""
    return clusters.get(
        model,
        prefill_args=STAGES,
        decode=3,
        decode_args=[[FLAG], [], [FLAG, VERIFY]],
        common_args=["--page-size", str(page)],
        backend=backend,
    )


def test_every_stage_sends_the_delta_of_its_layers(cluster, on):  # noqa: F811
    """Two stages, one answer: bytes sent and saved are those of all layers, of the pages that decode lacks, no more."""
    assert "whole prompts" not in log_of(cluster, on.decode_url)
    on.flush()
    names = [f"sglang:kv_transfer_{kind}_bytes_total" for kind in ("sent", "saved")]
    rnd, held = random.Random(11), 0
    # Five chunks, of which the second turn skips four and part of the fifth.
    history = words(rnd, 300)
    for _ in range(3):
        before = [counter(on.prefill_url, name) for name in names]
        answer = on(history, 12)
        details = answer["meta_info"]["cached_tokens_details"]
        assert details["decode_prefix"] == held
        sent, saved = (counter(on.prefill_url, name) - was for name, was in zip(names, before, strict=True))
        assert (sent, saved) == (details["transferred_bytes"], details["saved_bytes"])
        token_bytes = details["transferred_bytes"] // (-(-details["transferred"] // 16) * 16)
        assert token_bytes == LAYERS * 2 * 8 * 64 * 4
        # Of the answer, the last token and, with overlapped steps, no other have no KV.
        held = (len(history) + 12 - 1) // 16 * 16
        history = history + answer["output_ids"] + words(rnd, 40)


def test_digests_of_the_stages_are_those_of_the_model(cluster, truth):
    pair = Pair(cluster, decode=2)
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    assert counter(pair.decode_url, "sglang:decode_prefix_hit_tokens_total") > 0
    assert counter(pair.decode_url, MISMATCHES) == 0
    assert "without being verified" not in log_of(cluster, pair.decode_url)
    pair.check_idle()


def test_stages_go_on_together_when_requests_are_lost(cluster, on, truth):  # noqa: F811
    """Requests that end on decode at any moment of their prefill: stages that do not run the same batches hang."""
    on.flush()
    rnd = random.Random(5)

    def lose(i: int) -> set[int]:
        body = on.body(words(rnd, 400), 4, rid=f"lost-{i}")
        halves = [
            on._workers.submit(requests.post, url + "/generate", json=body, timeout=100)
            for url in (on.prefill_url, on.decode_url)
        ]
        if i % 12 == 11:
            # Too late for these, however long they take.
            wait(halves)
        time.sleep(0.01 * (i % 12))
        # Not on prefill, which hears of it from decode: each stage for itself.
        requests.post(on.decode_url + "/abort_request", json={"rid": body["rid"]}, timeout=30)
        return {half.result().status_code for half in halves}

    with ThreadPoolExecutor(4) as pool:
        losing = [pool.submit(lose, i) for i in range(24)]
        assert conversations(on, seed=1) == truth["conversations"]
        answered = set().union(*(lost.result() for lost in losing))
    # Some were lost, and nobody's end was the worker's; `check_idle` sees that nothing is left in its queues.
    assert answered == {200, 500}
    assert conversations(on) == truth["conversations"]


def test_latents_come_from_every_stage_to_every_rank(clusters, mla_model, mla_truth, backend):
    """MLA: two stages of one rank each, and a decode worker of two, each of which has all latents."""
    held = clusters.get(
        mla_model,
        prefill_args=STAGES,
        decode_args=[FLAG, VERIFY, *TP2],
        common_args=["--page-size", "16"],
        backend=backend,
    )
    pair = Pair(held)
    assert conversations(pair) == mla_truth["conversations"]
    prompt = base_prompt(16)
    assert [pair(prompt)["output_ids"] for _ in range(2)] == [mla_truth["base", 16]] * 2
    assert pair(prompt)["meta_info"]["cached_tokens_details"]["transferred"] == 0
    assert counter(pair.decode_url, MISMATCHES) == 0
    assert "without being verified" not in log_of(held, pair.decode_url)
    pair.check_idle()
