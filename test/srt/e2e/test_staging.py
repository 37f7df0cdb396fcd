"""Mooncake's staging buffers between different TP sizes, with prefixes that lie on no grid of prefill's chunks."""

from __future__ import annotations

import pytest
from pd import check_tp_pair, tp_cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("backend", ["mooncake"], indirect=True)]

# The least there is: prompts go in several pieces, which have to wait for each other.
SIZES = {"SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "1", "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": "1"}


@pytest.fixture(scope="module")
def cluster(clusters, model, backend):
    return tp_cluster(clusters, model, backend, env={"SGLANG_DISAGG_STAGING_BUFFER": "1", **SIZES})


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2)])
def test_staged_pieces_give_the_same_tokens(cluster, truth, prefill_tp, decode_tp):
    check_tp_pair(cluster, truth, prefill_tp, decode_tp)
    if prefill_tp == decode_tp:
        return
    prefill = [process for process in cluster.processes if process.role == "prefill"][prefill_tp - 1]
    assert "goes through staging buffers" in prefill.log_path.read_text()
