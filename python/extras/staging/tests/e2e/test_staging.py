"""Mooncake's staging buffers between different TP sizes, with prefixes that lie on no grid of prefill's chunks."""

from __future__ import annotations

import pytest
from e2e_fixtures import aggregated_answers
from pd import check_tp_pair, tp_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("backend", ["mooncake"], indirect=True)]

# The least there is: prompts go in several pieces, which have to wait for each other.
SIZES = {"SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "1", "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": "1"}


@pytest.fixture(scope="module", params=["auto", "fp8_e4m3"])
def world(clusters, model, backend, request):
    """Workers whose KV is of a type, and what the engine says with KV of that type."""
    options = ["--kv-cache-dtype", request.param]
    if request.param == "auto":
        truth = request.getfixturevalue("truth")
    else:
        truth = aggregated_answers(clusters, model, *options)
    return tp_cluster(clusters, model, backend, *options, env={"SGLANG_DISAGG_STAGING_BUFFER": "1", **SIZES}), truth


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2)])
def test_staged_pieces_give_the_same_tokens(world, prefill_tp, decode_tp):
    cluster, truth = world
    check_tp_pair(cluster, truth, prefill_tp, decode_tp)
    if prefill_tp == decode_tp:
        return
    prefill = [process for process in cluster.processes if process.role == "prefill"][prefill_tp - 1]
    assert "goes through staging buffers" in prefill.log_path.read_text()
