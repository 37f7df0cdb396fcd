"""A decode pool so small that requests wait, the tree is evicted and running requests are retracted."""

from __future__ import annotations

import random

import pytest
from pd import FLAG, Pair, conversations, counter, log_of, words

pytestmark = pytest.mark.timeout(600)

HOST = ["--enable-hierarchical-cache", "--hicache-ratio", "16"]


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """All decode workers hold 1024 tokens, which is about three of the six long answers.

    Decode 1 and 2 keep what they evict in host memory, decode 2 computes short remainders itself, without overlapped
    steps.
    """
    small = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"]
    local = ["--disaggregation-decode-local-prefill", "auto", "--disable-overlap-schedule"]
    on = [*small, FLAG]
    return clusters.get(
        model,
        decode=3,
        decode_args=[on, [*on, *HOST], [*on, *HOST, *local]],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64", "--served-model-name", "m"],
    )


@pytest.mark.parametrize("decode", range(3), ids=["flag", "host tier", "host tier and local prefill"])
def test_answers_survive_eviction_and_retraction(cluster, truth, decode):
    pair = Pair(cluster, decode=decode)
    for _ in range(2):
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
    pair.check_idle()
    assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough for a retraction"
    assert counter(pair.decode_url, "sglang:decode_admissions_blocked_total") > 0
    assert counter(pair.decode_url, "sglang:evicted_tokens_total") > 0
    if decode > 0:
        assert counter(pair.decode_url, "sglang:decode_host_loaded_tokens_total") > 0
        assert counter(pair.decode_url, "sglang:hicache_host_used_tokens") > 0


@pytest.mark.parametrize("decode", [1, 2])
def test_what_has_left_the_pool_is_not_sent_again(cluster, decode):
    """A prompt, others that take the pool, and the prompt again with more behind it."""
    pair, rnd = Pair(cluster, decode=decode), random.Random(decode)
    pair.flush()
    prompt = words(rnd, 300)
    first = pair(prompt)["output_ids"]
    for _ in range(4):
        pair(words(rnd, 400))
    again = pair(prompt + first + words(rnd, 20))
    details = again["meta_info"]["cached_tokens_details"]
    # All but the last token of the answer, whole pages.
    held = (300 + len(first) - 1) // 16 * 16
    assert (details["decode_prefix"], details["decode_host"]) == (held, held)
    assert details["transferred"] == (0 if decode == 2 else 300 + len(first) + 20 - held)
    pair.check_idle()
