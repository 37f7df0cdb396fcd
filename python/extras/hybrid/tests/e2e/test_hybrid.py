"""The oracle for models with states: answers are the aggregated engine's though decode keeps states of no prefix.

The tests are those of test_oracle.py, with other models: linear attention (GDN, KDA), Mamba2. Steps do not overlap with
pages of 1; they do with larger ones, for which prefill needs `extra_buffer`, or no cache where the engine has it not.
"""

from __future__ import annotations

import importlib

import pytest
import requests
import torch
from e2e_fixtures import aggregated_answers
from oracle_of_all import *  # noqa: F403
from pd import CHUNK, FLAG, TP2, Pair, base_prompt, conversations, counter, log_of
from test_host_tier import HOST, SMALL, check
from test_oracle import (  # noqa: F401
    test_extra_key_keeps_prefixes_apart,
    test_flush_forgets_everything,
    test_health_checks_leave_nothing,
    test_pause_and_continue,
    test_weight_update_leaves_no_stale_kv,
)

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

# Not for a decode worker without the flag: its steps then take pinned memory, which a CPU host has not.
EXTRA_BUFFER = ["--mamba-scheduler-strategy", "extra_buffer"]
SLOTS = ["--max-mamba-cache-size", "80"]


@pytest.fixture(scope="module", params=["qwen3-next", "falcon-h1", "nemotron-h", "kimi-linear"])
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory, arch):
    return str(make_model(tmp_path_factory.mktemp("model") / arch, ModelShape(arch)))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory, arch):
    return str(make_model(tmp_path_factory.mktemp("model") / "other", ModelShape(arch), seed=1))


@pytest.fixture(scope="module")
def large_pages(arch):
    """Options of workers with pages of more than one token, of a prefill and of a decode worker with the flag."""
    return (EXTRA_BUFFER, EXTRA_BUFFER) if arch == "qwen3-next" else (["--disable-radix-cache"], [])


@pytest.fixture(scope="module")
def truth(clusters, model):
    return aggregated_answers(clusters, model)


@pytest.fixture(scope="module", params=[1, 64])
def page(request):
    return request.param


def with_states(clusters, model, backend, page, large_pages=(EXTRA_BUFFER, EXTRA_BUFFER)):
    """Decode 0 has the flag, decode 1 not."""
    args = ["--page-size", str(page), "--chunked-prefill-size", CHUNK[page], *SLOTS]
    prefill, decode = large_pages if page > 1 else ([], [])
    workers = {"prefill_args": prefill, "decode": 2, "decode_args": [[FLAG, *decode], []]}
    return clusters.get(model, common_args=args, backend=backend, **workers)


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page, large_pages):
    return with_states(clusters, model, backend, page, large_pages)


def test_a_full_hit_brings_the_state_and_no_kv(on, truth, page):  # noqa: F811
    """Rows 4 to 6: a model with state, all of whose KV decode holds, still has its state to wait for."""
    on.flush()
    base = base_prompt(page)
    assert on(base)["output_ids"] == truth["base", page]
    names = [f"sglang:kv_transfer_{kind}_bytes_total" for kind in ("sent", "state")]
    before = [counter(on.prefill_url, name) for name in names]
    again = on(base)
    assert again["output_ids"] == truth["base", page]
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == 0
    kv, states = (counter(on.prefill_url, name) - was for name, was in zip(names, before, strict=True))
    assert kv == 0 and states > 0


def test_a_host_tier_keeps_the_kv_and_prefill_sends_the_state(clusters, model, truth, backend, page, large_pages):
    prefill, decode = large_pages if page > 1 else ([], [])
    cluster = clusters.get(
        model,
        decode=1,
        prefill_args=[*SLOTS, *prefill],
        decode_args=[[*SMALL, *HOST, *SLOTS, *decode]],
        common_args=["--page-size", str(page), "--chunked-prefill-size", CHUNK[page]],
        backend=backend,
    )
    check(Pair(cluster), truth)


def test_the_truth_is_what_transformers_says(truth, model, arch):
    """The engine's layers on a CPU host against the reference's; and a state that is lost shows in the next token."""
    if arch in ("nemotron-h", "kimi-linear"):
        pytest.skip("transformers has no Kimi-Linear, and no MLP layers for Nemotron-H")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # Of a model that does not make one itself.
    falcon = importlib.import_module("transformers.models.falcon_h1.modeling_falcon_h1")

    @torch.no_grad()
    def answer(ids: list[int], tokens: int, spoil: bool) -> list[int]:
        cache = None
        if arch == "falcon-h1":
            devices = ["cpu"] * reference.config.num_hidden_layers
            cache = falcon.FalconHybridMambaAttentionDynamicCache(reference.config, 1, torch.float32, devices)
        out = reference(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [out.logits[0, -1].argmax().item()]
        states = cache.ssm_states.values() if arch == "falcon-h1" else cache.recurrent_states
        for state in states if spoil else []:
            if state is not None:
                state.zero_()
        while len(found) < tokens:
            at = torch.tensor([len(ids) + len(found) - 1])
            out = reference(torch.tensor([found[-1:]]), past_key_values=cache, use_cache=True, cache_position=at)
            found.append(out.logits[0, -1].argmax().item())
        return found

    for page in (1, 64):
        expected = truth["base", page]
        assert answer(base_prompt(page), len(expected), spoil=False) == expected
        assert answer(base_prompt(page), 2, spoil=True) != expected[:2]


def small(clusters, model, backend, slots, large_pages=(EXTRA_BUFFER, EXTRA_BUFFER)):
    """Decode 0 has the flag, decode 1 not; their pools hold about three of the six long answers, or as few states."""
    prefill, decode = large_pages
    few = ["--num-reserved-decode-tokens", "16", *(["--max-total-tokens", "1024"] if slots is None else [])]
    few += ["--max-mamba-cache-size", str(slots), "--max-running-requests", str(slots)] if slots else []
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *SLOTS]
    workers = {"prefill_args": prefill, "decode": 2, "decode_args": [[*few, FLAG, *decode], few]}
    return clusters.get(model, common_args=common, backend=backend, **workers)


@pytest.mark.parametrize("slots", [None, 3], ids=["few pages", "few states"])
def test_answers_survive_eviction_and_retraction(clusters, model, truth, backend, slots, large_pages):
    """Overlapped; the bare engine's scheduler ends when it has to retract, or has no slot for a state (row 32)."""
    cluster = small(clusters, model, backend, slots, large_pages)  # noqa: F811
    for decode in (0, 1):
        pair = Pair(cluster, decode=decode)
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
        pair.check_idle()
        retracted = "Retract requests" in log_of(cluster, pair.decode_url)
        assert retracted or slots is not None, "the pool was not small enough for a retraction"


def test_tensor_parallel_sizes(clusters, model, truth, backend, large_pages, arch):
    """Equal sizes work. With different ones the handshake says why not: states are not cut."""
    if arch == "falcon-h1":
        # The engine adds up what its Mamba2 layers say on each rank, of which each is the sum.
        truth = aggregated_answers(clusters, model, *TP2)
    prefill, decode = large_pages
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *SLOTS]
    # In turn: the cluster has started when it is answered through the gateway, by which one prefill is of no use.
    options = {
        "prefill": 2,
        "prefill_args": [prefill, [*prefill, *TP2]],
        "decode_args": [FLAG, *decode, *TP2],
        "router_args": ["--policy", "round_robin"],
    }
    options["common_args"] = common
    cluster = clusters.get(model, backend=backend, **options)  # noqa: F811
    pair = Pair(cluster, 1, 0)
    assert conversations(pair) == truth["conversations"]
    again = [pair(base_prompt(16)) for _ in range(2)]
    assert [answer["output_ids"] for answer in again] == [truth["base", 16]] * 2
    assert again[1]["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()
    other = Pair(cluster, 0, 0)
    body = other.body(base_prompt(16), 4)
    waits = other._workers.submit(requests.post, other.prefill_url + "/generate", json=body, timeout=100)
    reply = requests.post(other.decode_url + "/generate", json=body, timeout=100)
    # The rank that answers may know no more yet than that another one could not.
    assert reply.status_code == 500 and "Start both with the same --tp-size" in log_of(cluster, other.decode_url)
    requests.post(other.prefill_url + "/abort_request", json={"abort_all": True}, timeout=30)
    waits.result()
    pair.check_idle()
