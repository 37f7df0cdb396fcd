"""Equal and different TP sizes of prefill and decode, with and without MLA: same tokens, sound pools on each rank."""

from __future__ import annotations

import pytest
from pd import FLAG, Pair, base_prompt, conversations

pytestmark = pytest.mark.timeout(600)

ARGS = ["--page-size", "16", "--chunked-prefill-size", "64"]
TP2 = ["--tp-size", "2"]


def check(pair, truth):
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    # Again, now with everything in the tree: a full hit on every rank.
    base = base_prompt(16)
    assert pair(base)["output_ids"] == truth["base", 16]
    again = pair(base)
    assert again["output_ids"] == truth["base", 16]
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()


@pytest.mark.parametrize("decode_tp", [1, 2])
def test_from_two_prefill_ranks(clusters, model, truth, decode_tp):
    cluster = clusters.get(model, decode=2, prefill_args=TP2, decode_args=[[FLAG], [FLAG, *TP2]], common_args=ARGS)
    check(Pair(cluster, decode=decode_tp - 1), truth)


def test_from_one_prefill_rank_to_two(clusters, model, truth):
    check(Pair(clusters.get(model, decode_args=[FLAG, *TP2], common_args=ARGS)), truth)


@pytest.mark.parametrize("decode_tp", [1, 2])
def test_mla_from_two_prefill_ranks(clusters, mla_model, mla_truth, decode_tp):
    """With MLA and fewer decode ranks, one prefill rank sends and the others are dummies (trap 7)."""
    cluster = clusters.get(mla_model, decode=2, prefill_args=TP2, decode_args=[[FLAG], [FLAG, *TP2]], common_args=ARGS)
    check(Pair(cluster, decode=decode_tp - 1), mla_truth)


def test_mla_from_one_prefill_rank(clusters, mla_model, mla_truth):
    check(Pair(clusters.get(mla_model, decode_args=[FLAG, *TP2], common_args=ARGS)), mla_truth)
