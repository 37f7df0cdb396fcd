"""I8: a decode step that writes as late as it may destroys nothing that a prefill has sent."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pd import FLAG, Pair, words

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(clusters, model, backend):
    """Decode workers with room for one request and a half, and writes delayed: with the fence and without it."""
    late = {"PYTHONPATH": str(Path(__file__).parent / "late_writes")}
    small = ["--max-total-tokens", "256", "--num-reserved-decode-tokens", "16", FLAG]
    return clusters.get(
        model,
        decode=2,
        decode_args=small,
        decode_env=[late, {**late, "LATE_WRITES_FENCE": "0"}],
        backend=backend,
        common_args=["--page-size", "1"],
    )


def wrong_answers(pair: Pair) -> int:
    """Answers to requests that wait for each other's memory, of those that differ from what each gets alone."""
    rnd = random.Random(4)
    prompts = [words(rnd, 110) for _ in range(6)]
    alone = []
    for prompt in prompts:
        alone.append(pair(prompt, 60)["output_ids"])
        pair.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: pair(prompt, 60)["output_ids"], prompts))
    pair.check_idle()
    return sum(a != b for a, b in zip(alone, together, strict=True))


def test_a_late_write_harms_nobody(cluster):
    assert wrong_answers(Pair(cluster, decode=0)) == 0


def test_without_the_fence_it_does(cluster):
    """Or the test above would show nothing."""
    assert wrong_answers(Pair(cluster, decode=1)) > 0
