"""A decode pool so small that requests wait, the tree is evicted and running requests are retracted."""

from __future__ import annotations

import pytest
from pd import FLAG, Pair, conversations, counter, log_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """Decode 0 has the flag, decode 1 not; both hold 1024 tokens, which is about three of the six long answers."""
    small = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"]
    return clusters.get(
        model,
        decode=2,
        decode_args=[[*small, FLAG], small],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )


@pytest.mark.parametrize("decode", [0, 1], ids=["flag", "no flag"])
def test_answers_survive_eviction_and_retraction(cluster, truth, decode):
    pair = Pair(cluster, decode=decode)
    for _ in range(2):
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
    pair.check_idle()
    if decode == 0:
        assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough for a retraction"
        assert counter(pair.decode_url, "sglang:decode_admissions_blocked_total") > 0
        assert counter(pair.decode_url, "sglang:evicted_tokens_total") > 0
