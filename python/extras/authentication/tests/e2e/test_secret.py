"""A deployment with a shared secret says what one without says, and who has another secret is told at once."""

from __future__ import annotations

import random
import time

import pytest
import requests
from pd import FLAG, Pair, conversations, counter, log_of, words
from sglang.srt.disaggregation.common.authentication import VARIABLE

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, tmp_path_factory):
    """Decode 0 has prefill's secret, decode 1 another."""
    files = [tmp_path_factory.mktemp("secret") / name for name in ("ours", "other")]
    for number, file in enumerate(files):
        file.write_text(f"{number}123456789abcdef0123456789abcdef\n")
    ours, other = ({VARIABLE: str(file)} for file in files)
    return clusters.get(
        model,
        decode=2,
        decode_args=[FLAG],
        prefill_env=ours,
        decode_env=[ours, other],
        common_args=["--page-size", "16"],
        routers={"main": ((0,), [])},
        backend=backend,
    )


def test_with_the_secret_everything_is_as_without(cluster, truth):
    pair = Pair(cluster, decode=0)
    hit = counter(pair.decode_url, "sglang:decode_prefix_hit_tokens_total")
    assert conversations(pair) == truth["conversations"]
    assert counter(pair.decode_url, "sglang:decode_prefix_hit_tokens_total") > hit
    pair.check_idle()
    for url in (pair.prefill_url, pair.decode_url):
        assert "Ignored" not in log_of(cluster, url)


def test_a_worker_with_another_secret_gets_nothing_and_is_told(cluster, truth):
    stranger, pair = Pair(cluster, decode=1), Pair(cluster, decode=0)
    began = time.monotonic()
    body = stranger.body(words(random.Random(1), 40), 4)
    # Prefill waits for a decode that never comes, for as long as a bootstrap may take.
    first = stranger._workers.submit(requests.post, stranger.prefill_url + "/generate", json=body, timeout=120)
    reply = requests.post(stranger.decode_url + "/generate", json=body, timeout=120)
    assert reply.status_code == 500 and VARIABLE in reply.text and time.monotonic() - began < 10
    requests.post(stranger.prefill_url + "/abort_request", json={"abort_all": True}, timeout=10)
    assert first.result().status_code != 200
    assert conversations(pair) == truth["conversations"], "others have not noticed"
    pair.check_idle()
