"""Workers with and without the patch set serve each other: mixed clusters and rolling upgrades."""

from __future__ import annotations

from pathlib import Path

import pytest
from pd import FLAG, Pair, check_idle, conversations, counter, log_of

pytestmark = pytest.mark.timeout(600)

WARNING = "does not understand a decode prefix"


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """Prefill and decode 0 have the patch set, prefill and decode 1 are the bare engine; decode 0 has the flag."""
    bare = {"SGLANG_PD_RADIX": "0", "PYTHONPATH": str(Path(__file__).parent / "bare_engine")}
    return clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[[FLAG], []],
        prefill_env=[{}, bare],
        decode_env=[{}, bare],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )


@pytest.mark.parametrize("prefill", [0, 1], ids=["patched prefill", "bare prefill"])
@pytest.mark.parametrize("decode", [0, 1], ids=["patched decode", "bare decode"])
def test_each_pair_agrees_with_the_engine(cluster, truth, prefill, decode):
    pair = Pair(cluster, prefill, decode)
    for _ in range(2):
        assert conversations(pair) == truth["conversations"]
    if prefill == decode == 0:
        pair.check_idle()


def test_one_decode_serves_both_prefills_by_turns(cluster, truth):
    """What came over the bare prefill is in decode's tree too, and the patched one need not send it again."""
    old, new = Pair(cluster, 1, 0), Pair(cluster, 0, 0)
    old.flush(old.decode_url)
    assert conversations(old) == truth["conversations"]
    hit = counter(new.decode_url, "sglang:decode_prefix_hit_tokens_total")
    assert conversations(new) == truth["conversations"]
    assert counter(new.decode_url, "sglang:decode_prefix_hit_tokens_total") > hit
    new.check_idle()


def test_one_warning_per_peer(cluster):
    log = log_of(cluster, cluster.decode_urls[0])
    assert log.count(WARNING) == 1, "a prefill without the patch set is named once"


@pytest.mark.parametrize("decode", [0, 1], ids=["patched decode", "bare decode"])
def test_what_prefill_refuses_is_over_at_once_on_either_decode(cluster, decode):
    """Both refuse a grammar that is none; a bare decode worker waits for the one token that it then asks for."""
    pair = Pair(cluster, 0, decode)
    body = pair.body([5] * 40, 8)
    body["sampling_params"] |= {"regex": "([0-9"}
    answers = pair.ask_prefill(body), pair.ask_decode(body)
    assert [answer.result(timeout=60).status_code for answer in answers] == [400, 400]
    for url in (pair.prefill_url, pair.decode_url)[: 2 - decode]:
        check_idle(url)
