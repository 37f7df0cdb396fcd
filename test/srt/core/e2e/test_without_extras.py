"""Workers with SGLANG_PD_RADIX_EXTRAS=none: the core alone says what the aggregated engine says, token for token."""

from __future__ import annotations

import pytest
from pd import FLAG, Pair, conversations, log_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """Decode 0 holds 1024 tokens, about three of the six long answers; decode 1 has two ranks."""
    return clusters.get(
        model,
        decode=2,
        decode_args=[
            [FLAG, "--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"],
            [FLAG, "--tp-size", "2"],
        ],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
        env={"SGLANG_PD_RADIX_EXTRAS": "none"},
    )


@pytest.mark.parametrize("decode", range(2), ids=["small pool", "two ranks"])
def test_the_core_alone(cluster, truth, decode):
    pair = Pair(cluster, decode=decode)
    if decode == 0:
        for _ in range(2):
            assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough for a retraction"
    assert conversations(pair) == truth["conversations"]
    prompt = [*range(400, 500)]
    turn = [*prompt, *pair(prompt)["output_ids"], 500]
    # Whole pages of the prompt and the answer.
    assert pair(turn)["meta_info"]["cached_tokens"] >= 96
