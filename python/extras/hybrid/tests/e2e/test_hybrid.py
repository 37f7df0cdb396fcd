"""The oracle for linear attention (GDN): answers are the aggregated engine's though decode keeps states of no prefix.

The tests are those of test_oracle.py, with another model. Pages of 1 come with the engine's default strategy, which
does not overlap steps; larger ones with `extra_buffer`, which does.
"""

from __future__ import annotations

import pytest
import requests
import torch
from e2e_fixtures import aggregated_answers
from pd import CHUNK, FLAG, TP2, Pair, base_prompt, conversations, counter, log_of
from test_host_tier import HOST, SMALL, check
from test_oracle import (  # noqa: F401
    off,
    on,
    test_abort_at_every_stage,
    test_conversations_through_the_router,
    test_conversations_with_the_flag,
    test_conversations_without_the_flag,
    test_every_hit_length,
    test_extra_key_keeps_prefixes_apart,
    test_flush_forgets_everything,
    test_health_checks_leave_nothing,
    test_many_clients_with_one_new_prefix,
    test_pause_and_continue,
    test_weight_update_leaves_no_stale_kv,
)

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

SHAPE = ModelShape(arch="qwen3-next")
# Not for a decode worker without the flag: its steps then take pinned memory, which a CPU host has not.
EXTRA_BUFFER = ["--mamba-scheduler-strategy", "extra_buffer"]
SLOTS = ["--max-mamba-cache-size", "80"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "hybrid", SHAPE))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "other-hybrid", SHAPE, seed=1))


@pytest.fixture(scope="module")
def truth(clusters, model):
    return aggregated_answers(clusters, model)


@pytest.fixture(scope="module", params=[1, 64])
def page(request):
    return request.param


def with_states(clusters, model, backend, page):
    """Decode 0 has the flag, decode 1 not; with larger pages than 1 in the strategy that overlaps steps."""
    args = ["--page-size", str(page), "--chunked-prefill-size", CHUNK[page], *SLOTS]
    extra = EXTRA_BUFFER if page > 1 else []
    workers = {"prefill_args": extra, "decode": 2, "decode_args": [[FLAG, *extra], []]}
    return clusters.get(model, common_args=args, backend=backend, **workers)


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    return with_states(clusters, model, backend, page)


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


def test_a_host_tier_keeps_the_kv_and_prefill_sends_the_state(clusters, model, truth, backend, page):
    extra = [*SLOTS, *(EXTRA_BUFFER if page > 1 else [])]
    cluster = clusters.get(
        model,
        decode=1,
        prefill_args=extra,
        decode_args=[[*SMALL, *HOST, *extra]],
        common_args=["--page-size", str(page), "--chunked-prefill-size", CHUNK[page]],
        backend=backend,
    )
    check(Pair(cluster), truth)


def test_the_truth_is_what_transformers_says(truth, model):
    """The engine's layers on a CPU host against the reference's; and a state that is lost shows in the next token."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.no_grad()
    def answer(ids: list[int], tokens: int, spoil: bool) -> list[int]:
        out = reference(torch.tensor([ids]), use_cache=True)
        found = [out.logits[0, -1].argmax().item()]
        for state in out.past_key_values.recurrent_states if spoil else []:
            if state is not None:
                state.zero_()
        while len(found) < tokens:
            out = reference(torch.tensor([found[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[0, -1].argmax().item())
        return found

    for page in (1, 64):
        expected = truth["base", page]
        assert answer(base_prompt(page), len(expected), spoil=False) == expected
        assert answer(base_prompt(page), 2, spoil=True) != expected[:2]


def small(clusters, model, backend, slots):
    """Decode 0 has the flag, decode 1 not; their pools hold about three of the six long answers, or as few states."""
    few = ["--num-reserved-decode-tokens", "16", *(["--max-total-tokens", "1024"] if slots is None else [])]
    few += ["--max-mamba-cache-size", str(slots), "--max-running-requests", str(slots)] if slots else []
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *SLOTS]
    workers = {"prefill_args": EXTRA_BUFFER, "decode": 2, "decode_args": [[*few, FLAG, *EXTRA_BUFFER], few]}
    return clusters.get(model, common_args=common, backend=backend, **workers)


@pytest.mark.parametrize("slots", [None, 3], ids=["few pages", "few states"])
def test_answers_survive_eviction_and_retraction(clusters, model, truth, backend, slots):
    """Overlapped; the bare engine's scheduler ends when it has to retract, or has no slot for a state (row 32)."""
    cluster = small(clusters, model, backend, slots)  # noqa: F811
    for decode in (0, 1):
        pair = Pair(cluster, decode=decode)
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
        pair.check_idle()
        retracted = "Retract requests" in log_of(cluster, pair.decode_url)
        assert retracted or slots is not None, "the pool was not small enough for a retraction"


def test_tensor_parallel_sizes(clusters, model, truth, backend):
    """Equal sizes work. With different ones the handshake says why not: states are not cut."""
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *SLOTS, *EXTRA_BUFFER]
    # In turn: the cluster has started when it is answered through the gateway, by which one prefill is of no use.
    options = {
        "prefill": 2,
        "prefill_args": [[], TP2],
        "decode_args": [FLAG, *TP2],
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
    # The rank that answers may know no more yet than that another one could not; it hears why.
    cause = "Start both with the same --tp-size"
    assert reply.status_code == 500 and cause in reply.text and cause in log_of(cluster, other.decode_url)
    requests.post(other.prefill_url + "/abort_request", json={"abort_all": True}, timeout=30)
    waits.result()
    pair.check_idle()
