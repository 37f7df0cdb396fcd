"""Prompts that decode computes itself, on models and deployments of other kinds: the aggregated engine's answers."""

from __future__ import annotations

import pytest
from e2e_fixtures import aggregated_answers
from pd import FLAG, LOCAL, TP2, Pair, ask, conversations, counter
from test_dp_attention import DP2
from test_local_prefill import COMPUTED, REQUESTS
from test_lora import OPTIONS as LORA
from test_lora import PROMPTS
from test_lora import adapters as adapters
from test_lora import truth as lora_truth
from test_speculative_pairs import V1, V2, Watched, speculating

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

ON = [FLAG, LOCAL, "200"]
PAGES = ["--page-size", "16", "--chunked-prefill-size", "64"]
__all__ = ["adapters", "lora_truth"]


def check(pair: Pair, truth: dict) -> None:
    """Conversations, twice, and many at once; some of them computed here."""
    before = counter(pair.decode_url, REQUESTS)
    pair.flush()
    for _ in range(2):
        assert conversations(pair) == truth["conversations"]
    assert conversations(pair, 6, 1, seed=5, max_new=96) == truth["long"]
    assert counter(pair.decode_url, REQUESTS) > before and counter(pair.decode_url, COMPUTED) > 0
    pair.check_idle()


def test_mla(clusters, mla_model, mla_truth, backend):
    check(Pair(clusters.get(mla_model, decode_args=ON, common_args=PAGES, backend=backend)), mla_truth)


@pytest.mark.parametrize("prefill_tp", [1, 2])
def test_tensor_parallel(clusters, model, truth, backend, prefill_tp):
    cluster = clusters.get(
        model,
        prefill=2,
        prefill_args=[[], TP2],
        decode_args=[*ON, *TP2],
        common_args=PAGES,
        backend=backend,
    )
    check(Pair(cluster, prefill=prefill_tp - 1), truth)


def test_dp_attention(clusters, model, truth, backend):
    cluster = clusters.get(model, prefill_args=TP2, decode_args=[*ON, *TP2, *DP2], common_args=PAGES, backend=backend)
    check(Pair(cluster), truth)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8(clusters, model, backend, dtype):
    """What a step over a remainder reads has been rounded, whoever has computed it."""
    fp8 = ["--kv-cache-dtype", dtype]
    send = ask(clusters.get(model, aggregated=True, common_args=["--page-size", "16", *fp8]).router_url)
    truth = {"conversations": conversations(send), "long": conversations(send, 6, 1, seed=5, max_new=96)}
    check(Pair(clusters.get(model, decode_args=ON, common_args=[*PAGES, *fp8], backend=backend)), truth)


@pytest.mark.parametrize("arch", ["eagle", "eagle3"])
def test_drafts(clusters, tmp_path_factory, backend, arch):
    """Both versions of the engine's speculation; as many drafts accepted as of prompts that prefill has computed."""
    eagle = str(make_model(tmp_path_factory.mktemp("model") / arch, ModelShape(arch=arch)))
    truth = aggregated_answers(clusters, eagle)
    cluster = clusters.get(
        eagle,
        decode=4,
        decode_args=[ON, [FLAG], ON, [FLAG]],
        decode_env=[V1, V1, V2, V2],
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", "16"),
        backend=backend,
    )
    for local, remote in ((0, 1), (2, 3)):
        check(Pair(cluster, decode=local), truth)
        seen = []
        for decode in (local, remote):
            pair = Pair(cluster, decode=decode)
            pair.flush()
            watched = Watched(pair)
            conversations(watched, clients=1)
            seen.append(watched.accepted)
        assert seen[0] == seen[1]


# Not with DP attention: the engine's buffers for adapters of attention layers have another shape there, and it ends.
@pytest.mark.parametrize("ranks", [[], TP2], ids=["one rank", "two ranks"])
def test_adapters(clusters, model, adapters, lora_truth, backend, ranks):
    paths = [f"{name}={adapters[name]}" for name in "ab"]
    common = [*LORA, "--lora-paths", *paths]
    cluster = clusters.get(model, decode_args=[*ON, *ranks], common_args=common, prefill_args=ranks, backend=backend)
    pair = Pair(cluster)
    for _ in range(2):
        for i, prompt in enumerate(PROMPTS):
            for name in (None, "a", "b"):
                more = {} if name is None else {"lora_path": name}
                assert pair(prompt, 12, **more)["output_ids"] == lora_truth[name, i]
    assert counter(pair.decode_url, REQUESTS) >= 9
    pair.check_idle()
