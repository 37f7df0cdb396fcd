"""The oracle for sparse attention (DeepSeek-V3.2's layout): answers depend on which index keys decode holds.

The tests are those of test_oracle.py, with another model and pages of 64 tokens. `index_topk` is far below the length
of prompts, so that a wrong index page changes an answer.
"""

from __future__ import annotations

import pytest
from e2e_fixtures import aggregated_answers
from oracle_of_all import *  # noqa: F403
from pd import FLAG, LOCAL, TP2, Pair, base_prompt, check_tp_pair, conversations, counter, log_of, tp_cluster
from test_dp_attention import BY_PREFIX, DP2, Ranked, check_ranks
from test_oracle import (  # noqa: F401
    test_conversations_as_by_default,
    test_flush_forgets_everything,
)
from test_small_pool import HOST

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

PAGE = 64
# Chunks of two pages: prompts come in several.
COMMON = ["--page-size", str(PAGE), "--chunked-prefill-size", "128"]
# About three of the six long answers.
SMALL = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "dsa", ModelShape(arch="dsa")))


@pytest.fixture(scope="module")
def truth(clusters, model):
    return aggregated_answers(clusters, model, "--page-size", str(PAGE))


@pytest.fixture(scope="module")
def page():
    return PAGE


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend):
    """Decode 0 has the flag, 1 not, 2 computes remainders of prompts.

    3, with the flag, 4 and 5 have small pools; 5 keeps what it evicts in host memory.
    """
    workers = [
        [FLAG, "--disaggregation-decode-verify-pages"],
        [],
        [FLAG, LOCAL, "auto"],
        [FLAG, *SMALL],
        SMALL,
        [FLAG, *SMALL, *HOST],
    ]
    return clusters.get(
        model,
        decode=len(workers),
        decode_args=workers,
        backend=backend,
        common_args=[*COMMON, "--served-model-name", "m"],
    )


def test_bytes_are_those_of_the_delta(on, truth):  # noqa: F811
    """KV and index keys; of a full hit none."""
    names = [f"sglang:kv_transfer_{kind}_bytes_total" for kind in ("sent", "state")]

    def sent(prompt: list[int]) -> list[float]:
        before = [counter(on.prefill_url, name) for name in names]
        on(prompt)
        return [counter(on.prefill_url, name) - was for name, was in zip(names, before, strict=True)]

    on.flush()
    base = base_prompt(PAGE)
    kv, index = sent(base)
    pages = len(base) // PAGE
    assert kv > 0 and index > 0
    assert sent(base) == [0, 0]
    assert sent(base + base[:PAGE]) == [kv / pages, index / pages]


@pytest.mark.parametrize("decode", [3, 4, 5], ids=["flag", "no flag", "host tier"])
def test_answers_survive_eviction_and_retraction(cluster, truth, decode):
    """A resumed request has its index keys again; the engine's has another request's."""
    pair = Pair(cluster, decode=decode)
    for _ in range(2):
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
    pair.check_idle()
    assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough for a retraction"
    assert decode < 5 or counter(pair.decode_url, "sglang:decode_host_loaded_tokens_total") > 0


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (2, 1), (1, 2)])
def test_tensor_parallel_sizes(clusters, model, truth, backend, prefill_tp, decode_tp):
    """All ranks hold all index keys."""
    check_tp_pair(tp_cluster(clusters, model, backend, *COMMON), truth, prefill_tp, decode_tp)


@pytest.mark.parametrize("prefill", [1, 0], ids=["dp2", "tp2"])
def test_dp_attention(clusters, model, truth, backend, prefill):
    cluster = clusters.get(
        model,
        prefill=2,
        prefill_args=[TP2, [*TP2, *DP2]],
        decode_args=[[FLAG, *TP2, *DP2, *BY_PREFIX]],
        common_args=COMMON,
        backend=backend,
    )
    check_ranks(Ranked(cluster, prefill), truth)
