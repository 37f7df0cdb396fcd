"""EAGLE with the draft in the model (MTP), on linear attention (GDN), with the decode tree, as the proposal deploys it.

The tests are those of test_speculative_pairs.py. The state of a request is the one after the last token that was
accepted, in every step, and goes with it where the request goes; all slots are free at idle.
"""

from __future__ import annotations

import pytest
from e2e_fixtures import aggregated_answers
from pd import FLAG, TP2
from test_hybrid import EXTRA_BUFFER, SLOTS
from test_speculative_pairs import (  # noqa: F401
    CHAIN,
    SMALL,
    V1,
    V2,
    check_tensor_parallel_pair,
    pairs,
    test_aborts,
    test_chunked_prefill,
    test_conversations,
    test_every_hit_length,
    test_flush,
    test_retraction,
)

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

# The engine's own decode steps take pinned memory with `extra_buffer`, which a CPU host has not.
WITHOUT = ["--disable-radix-cache"]
WITH = [FLAG, *EXTRA_BUFFER]


@pytest.fixture(scope="module", params=["qwen3-next-mtp", "qwen3.5-moe-mtp"])
def model(request, tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "mtp", ModelShape(arch=request.param)))


@pytest.fixture(scope="module")
def plain(clusters, model):
    """The truth: what the engine says that neither disaggregates nor speculates."""
    return aggregated_answers(clusters, model)


def speculating(page: int) -> list[str]:
    pages = ["--page-size", str(page), "--chunked-prefill-size", "4096"]
    return ["--speculative-algorithm", "EAGLE", *CHAIN, *pages, *SLOTS]


@pytest.fixture(scope="module", params=[64])
def page(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(clusters, model, plain, backend, page):
    return clusters.get(
        model,
        prefill_args=EXTRA_BUFFER,
        decode=4,
        decode_args=[WITH, WITHOUT, WITH, WITHOUT],
        decode_env=[V1, V1, V2, V2],
        prefill_env=V2,
        common_args=speculating(page),
        backend=backend,
    )


@pytest.fixture(scope="module")
def small(clusters, model, plain, backend):
    return clusters.get(
        model,
        prefill_args=EXTRA_BUFFER,
        decode=4,
        decode_args=[[*SMALL, *WITH], [*SMALL, *WITHOUT], [*SMALL, *WITH], [*SMALL, *WITHOUT]],
        decode_env=[V1, V1, V2, V2],
        prefill_env=V2,
        common_args=speculating(16),
        backend=backend,
    )


def test_tensor_parallel_sizes(clusters, model, plain, backend):
    cluster = clusters.get(
        model,
        prefill_args=[*TP2, *EXTRA_BUFFER],
        decode=2,
        decode_args=[[*TP2, *WITH], [*TP2, *WITHOUT]],
        decode_env=V2,
        prefill_env=V2,
        common_args=speculating(64),
        backend=backend,
    )
    check_tensor_parallel_pair(cluster, plain)
