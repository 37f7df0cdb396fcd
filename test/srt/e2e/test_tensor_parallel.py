"""Equal and different TP sizes of prefill and decode, with and without MLA: same tokens, sound pools on each rank."""

from __future__ import annotations

import pytest
from pd import FLAG, Pair, base_prompt, conversations

pytestmark = pytest.mark.timeout(600)

TP2 = ["--tp-size", "2"]


@pytest.fixture(scope="module", params=["qwen3", "mla"])
def cluster_and_truth(request, clusters, backend):
    """Prefill 0 and decode 0 have one rank, prefill 1 and decode 1 have two."""
    names = ("model", "truth") if request.param == "qwen3" else ("mla_model", "mla_truth")
    model, truth = (request.getfixturevalue(name) for name in names)
    cluster = clusters.get(
        model,
        prefill=2,
        decode=2,
        prefill_args=[[], TP2],
        decode_args=[[FLAG], [FLAG, *TP2]],
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
        backend=backend,
    )
    return cluster, truth


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 1), (1, 2)])
def test_tensor_parallel_sizes(cluster_and_truth, prefill_tp, decode_tp):
    """With MLA and two prefill ranks for one of decode, one sends and the other is a dummy (trap 7)."""
    cluster, truth = cluster_and_truth
    pair = Pair(cluster, prefill_tp - 1, decode_tp - 1)
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    # Again, now with everything in the tree: a full hit on every rank.
    base = base_prompt(16)
    assert pair(base)["output_ids"] == truth["base", 16]
    again = pair(base)
    assert again["output_ids"] == truth["base", 16]
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()
