"""With --disaggregation-decode-verify-pages, what did not arrive as it was sent fails its request and stays nowhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import requests
from pd import FLAG, Pair, conversations, counter, generate_body, log_of, words

from sglang_pd_radix.tools.cluster import named_gateway

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

VERIFY = "--disaggregation-decode-verify-pages"
MISMATCHES = "sglang:decode_page_digest_mismatches_total"


@pytest.fixture(scope="module")
def cluster(clusters, model, backend):
    """A decode worker that verifies, and two with a transport that breaks odd rooms: one verifies, one does not."""
    broken = {"PYTHONPATH": str(Path(__file__).parent / "spoilt_pages")}
    return clusters.get(
        model,
        decode=3,
        decode_args=[[FLAG, VERIFY], [FLAG, VERIFY], [FLAG]],
        decode_env=[{}, broken, broken],
        common_args=["--page-size", "16"],
        backend=backend,
    )


def test_whole_pages_pass(cluster, truth):
    pair = Pair(cluster, decode=0)
    assert conversations(pair) == truth["conversations"]
    assert counter(pair.decode_url, "sglang:decode_prefix_hit_tokens_total") > 0
    assert counter(pair.decode_url, MISMATCHES) == 0
    assert "without being verified" not in log_of(cluster, pair.decode_url)
    pair.check_idle()


def test_a_spoilt_page_fails_its_request_and_enters_no_tree(cluster, truth):
    pair = Pair(cluster, decode=1)
    prompt = words(random.Random(5), 70)
    alone = Pair(cluster, decode=0)(prompt, 8)["output_ids"]
    body = pair.body(prompt, 8)
    body["bootstrap_room"] |= 1
    first = pair._workers.submit(requests.post, pair.prefill_url + "/generate", json=body, timeout=60)
    reply = requests.post(pair.decode_url + "/generate", json=body, timeout=60)
    first.result()
    assert reply.status_code == 500 and "is not what prefill sent" in reply.text
    assert counter(pair.decode_url, MISMATCHES) == 1
    pair.check_idle()
    assert pair.tree_tokens() == 0
    even = {"bootstrap_room": random.Random(6).randrange(2, 2**62, 2)}
    assert pair(prompt, 8, **even)["output_ids"] == alone
    pair.check_idle()


def test_unverified_it_is_answered_with(cluster):
    """Or the test above would show nothing."""
    pair = Pair(cluster, decode=2)
    prompt = words(random.Random(5), 70)
    odd = {"bootstrap_room": random.Random(6).randrange(1, 2**62, 2)}
    even = {"bootstrap_room": random.Random(7).randrange(2, 2**62, 2)}
    spoilt = pair(prompt, 8, **odd, return_logprob=True)
    pair.flush(pair.decode_url)
    whole = pair(prompt, 8, **even, return_logprob=True)
    assert spoilt["meta_info"]["output_token_logprobs"][1:] != whole["meta_info"]["output_token_logprobs"][1:]


@pytest.mark.parametrize("router", ["smg", "sglang-router"])
def test_a_gateway_retries_what_fails_after_prefill_has_answered(clusters, model, backend, router):
    """Prefill answers when a prompt has been computed. Decode reports what fails then, and that is retried."""
    broken = {"PYTHONPATH": str(Path(__file__).parent / "spoilt_pages")}
    options = {"gateway": named_gateway(router), "common_args": ["--page-size", "16"], "backend": backend}
    cluster = clusters.get(model, decode_args=[[FLAG, VERIFY]], decode_env=[broken], **options)
    rnd = random.Random(8)
    replies = [
        requests.post(cluster.router_url + "/generate", json=generate_body(words(rnd, 70), 8), timeout=60)
        for _ in range(12)
    ]
    assert [reply.status_code for reply in replies] == [200] * 12
    assert all(len(reply.json()["output_ids"]) == 8 for reply in replies)
    # Every odd room, and a gateway has a new one for each attempt.
    assert counter(cluster.decode_urls[0], MISMATCHES) > 0
    assert log_of(cluster, cluster.prefill_urls[0]).count('POST /generate HTTP/1.1" 200') >= 12
    Pair(cluster).check_idle()
