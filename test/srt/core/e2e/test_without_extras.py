"""Workers without extras, and without each one: they say what the aggregated engine says, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from pd import FLAG, Pair, conversations, log_of

from sglang_pd_radix.patching import loader

pytestmark = pytest.mark.timeout(600)

PYTHON = Path(__file__).parents[4] / "python"
SMALL = [FLAG, "--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"]  # About three of six long answers.
COMMON = ["--page-size", "16", "--chunked-prefill-size", "64"]


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """Decode 0 has a small pool, decode 1 two ranks."""
    return clusters.get(
        model,
        decode=2,
        decode_args=[SMALL, [FLAG, "--tp-size", "2"]],
        backend=backend,
        common_args=COMMON,
        env={loader.EXTRAS: "none"},
    )


@pytest.mark.parametrize("decode", range(2), ids=["small pool", "two ranks"])
def test_the_core_alone(cluster, truth, decode):
    check(cluster, truth, decode, small=decode == 0)


@pytest.mark.thorough
@pytest.mark.parametrize("extra", loader.known_extras(PYTHON))
def test_all_but_one(clusters, model, truth, backend, extra):
    gone = {extra, *(other for other, needs in loader.needs(PYTHON).items() if extra in needs)}
    others = [other for other in loader.known_extras(PYTHON) if other not in gone]
    check(
        clusters.get(
            model, decode_args=[SMALL], backend=backend, common_args=COMMON, env={loader.EXTRAS: ",".join(others)}
        ),
        truth,
        decode=0,
        small=True,
    )


def check(cluster, truth, decode, small):
    """A pair's answers, with a small pool after retractions too."""
    pair = Pair(cluster, decode=decode)
    if small:
        for _ in range(2):
            assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough for a retraction"
    assert conversations(pair) == truth["conversations"]
    prompt = [*range(400, 500)]
    turn = [*prompt, *pair(prompt)["output_ids"], 500]
    # Whole pages of the prompt and the answer.
    assert pair(turn)["meta_info"]["cached_tokens"] >= 96
