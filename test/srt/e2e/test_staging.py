"""Mooncake's staging buffers between different TP sizes, with prefixes that lie on no grid of prefill's chunks."""

from __future__ import annotations

import pytest
from pd import FLAG, Pair, base_prompt, conversations

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("backend", ["mooncake"], indirect=True)]

TP2 = ["--tp-size", "2"]
# The least there is: prompts go in several pieces, which have to wait for each other.
SIZES = {"SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "1", "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": "1"}


@pytest.fixture(scope="module")
def cluster(clusters, model, backend):
    """Prefill 0 and decode 0 have one rank, prefill 1 and decode 1 have two."""
    return clusters.get(
        model,
        prefill=2,
        decode=2,
        prefill_args=[[], TP2],
        decode_args=[[FLAG], [FLAG, *TP2]],
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
        backend=backend,
        env={"SGLANG_DISAGG_STAGING_BUFFER": "1", **SIZES},
    )


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2)])
def test_staged_pieces_give_the_same_tokens(cluster, truth, prefill_tp, decode_tp):
    pair = Pair(cluster, prefill_tp - 1, decode_tp - 1)
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    base = base_prompt(16)
    assert pair(base)["output_ids"] == truth["base", 16]
    again = pair(base)
    assert again["output_ids"] == truth["base", 16]
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()
    if prefill_tp == decode_tp:
        return
    prefill = [process for process in cluster.processes if process.role == "prefill"][prefill_tp - 1]
    assert "goes through staging buffers" in prefill.log_path.read_text()
