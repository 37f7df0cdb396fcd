"""Equal and different TP sizes of prefill and decode, with and without MLA: same tokens, sound pools on each rank."""

from __future__ import annotations

import pytest
from pd import check_tp_pair, tp_cluster

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["qwen3", "mla"])
def cluster_and_truth(request, clusters, backend):
    names = ("model", "truth") if request.param == "qwen3" else ("mla_model", "mla_truth")
    model, truth = (request.getfixturevalue(name) for name in names)
    return tp_cluster(clusters, model, backend), truth


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 1), (1, 2)])
def test_tensor_parallel_sizes(cluster_and_truth, prefill_tp, decode_tp):
    """With MLA and two prefill ranks for one of decode, one sends and the other is a dummy (trap 7)."""
    check_tp_pair(*cluster_and_truth, prefill_tp, decode_tp)
