"""What is refused at the door."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import xgrammar
from engine_classes import engine_class
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, MetadataBuffers
from sglang.srt.managers import request_checks
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_checks import (
    check_embeds,
    check_labels,
    check_prompt,
    check_request,
    check_sampling,
    check_types,
    check_without_tokenizer,
    stop_tokens,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from test_refused_requests import manager, request
from tokenizer_front import MODES, Manager, answers, body, run, with_adapters

VOCAB = 100
ENGINE = engine_class(TokenizerManager)
NAN, INF = math.nan, math.inf


def nested(depth: int) -> str:
    return '{"const":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


# Brackets in strings, and as many objects as a schema may have that refers to none.
FLAT = json.dumps({"enum": ["[{" * 5000, '"[' * 500, "\\"], "anyOf": [{} for _ in range(5000)]})


REFERS = '{"$defs":{"a":%s},"allOf":[' + '{"$ref":"#"},' * 3990 + "{}]}"


# Values of each option that the engine's own checks let pass: those that it serves, and those with which it is refused.
# Those of other options are in `test_request_builders.py`.
SAMPLING = {
    "stop": (["a", ["a", "b"], [], {"a": 1}, None], [[["a", "b"]]]),
    "temperature": ([0, 0.7, 1, True, 1e38], [NAN, INF, 1e39, 10**400]),
    "json_schema": (
        ["{}", "", "{nope", nested(100), FLAT, REFERS % nested(5), {}, None],
        [nested(101), nested(400_000), '{"a":"\\\\","b":' + nested(101), REFERS % nested(20)],
    ),
    "structural_tag": (["{}", "", nested(100), FLAT, None], [nested(101), REFERS % nested(20)]),
    "sampling_seed": ([0, 2**63 - 1, -(2**63), None], [2**63, 1.5, "1"]),
}


REQUEST = {
    "rid": (["a", None], [f"{HEALTH_CHECK_RID_PREFIX}_of_mine"]),
    "logprob_start_len": ([-1, 0, 5, None], [-2]),
    "top_logprobs_num": ([0, 100, None], [-1, 101, 2**31, [], [1]]),
    "token_ids_logprob": ([[0, 99], [], None], [[100], [-1]]),
    "custom_logit_processor": (["a", [], None], [["a"]]),
    "lora_path": (["a", "", [], None], [["a"], [None]]),
    "bootstrap_host": (
        ["10.0.0.1", "prefill-0.rack_2", "::1", "[fe80::1%eth0]", None],
        [["a"], "", "[::", "10.0.0.1:5", "http://a", "a b", "-a"],
    ),
    "bootstrap_room": ([0, 2**63 - 1, None], [-1, 2**63]),
    "extra_key": (["a", "", None], [["a"], []]),
    "priority": ([-5, 5, -(2**63), None], [2**63]),
}


OF_A_PAIR, OF_KEYS = ("rid", "bootstrap_host", "bootstrap_room"), ("extra_key", "priority")


def sampling(stream: bool = True, deterministic: bool = True, **params) -> None:
    """As it comes from the engine's checks."""
    made = SamplingParams(**params)
    made.normalize(None)
    made.verify(VOCAB)
    check_sampling(made, VOCAB, stream=stream, deterministic=deterministic)


def check(obj: GenerateReqInput, pair: bool = True, keyed: bool = True) -> None:
    check_request(obj, VOCAB, pair, keyed=keyed)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options(name):
    good, bad = SAMPLING[name]
    for value in good:
        sampling(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must"):
            sampling(**{name: value})


@pytest.mark.parametrize("name", REQUEST)
def test_request_options(name):
    good, bad = REQUEST[name]
    for value in good:
        check(request(return_logprob=True, **{name: value}))
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must"):
            check(request(return_logprob=True, **{name: value}))


def test_options_that_the_engine_does_not_look_at_may_be_anything():
    for name in (*OF_A_PAIR, *OF_KEYS):
        for value in REQUEST[name][1]:
            check(request(**{name: value}), pair=False, keyed=False)
    for value in REQUEST["logprob_start_len"][1]:
        check(request(logprob_start_len=value))
    for value in (0, 2**31):
        sampling(temperature=0, top_k=value)
    for value in (1.5, 2**64 - 1, "a"):
        sampling(sampling_seed=value, deterministic=False)
    for value in ("1", [1]):
        sampling(stream_interval=value, stream=False)
    # Of KV that is kept under a key it matters, with and without a peer.
    with pytest.raises(ValueError, match="extra_key"):
        check(request(extra_key=["a"]), pair=False)


def test_options_that_do_not_go_together():
    # Of these, a worker without a peer can do what it does without this package.
    for options in (
        {"top_logprobs_num": -1, "return_logprob": True},
        {"session_params": {"id": "a"}},
        {"bootstrap_room": 0, "bootstrap_host": "h"},
    ):
        check(request(**options), pair=False)
        with pytest.raises(ValueError, match=next(iter(options))):
            check(request(**options))
    with pytest.raises(ValueError, match="at most 128"):
        check_request(request(top_logprobs_num=129, return_logprob=True), 1000, True)
    check_request(request(top_logprobs_num=129, return_logprob=True), 1000, False)
    check_request(request(top_logprobs_num=129), 1000, True)
    # One that has not asked for logprobs may be in a batch with one that has.
    with pytest.raises(ValueError, match="at most 100"):
        check(request(top_logprobs_num=VOCAB + 1), pair=False)
    with pytest.raises(ValueError, match="token_ids_logprob"):
        check(request(token_ids_logprob=[VOCAB]), pair=False)
    # A health check's, of which a busy scheduler drops what is called so.
    health = f"{HEALTH_CHECK_RID_PREFIX}_of_mine"
    check(request(rid=health, bootstrap_room=0, bootstrap_host=FAKE_BOOTSTRAP_HOST))


def test_a_stop_token_is_a_token_and_what_the_engine_has_checked_is_checked_again():
    """With ``min_new_tokens`` of one request, the engine makes a tensor of those of its whole batch."""
    values = {5, 6.0, True, 10**9, 2**70, -1, 1.5, "7", None, INF, VOCAB, VOCAB - 1}
    assert stop_tokens(values, VOCAB) == {5, 6, 1, VOCAB - 1}
    assert stop_tokens({10**9}, VOCAB) is None and stop_tokens(None, VOCAB) is None
    made = manager(DisaggregationMode.NULL)
    made.preferred_sampling_params, made.sampling_params_class = {"stop_token_ids": [5, 10**9]}, SamplingParams
    made.tokenizer, made.model_config = None, SimpleNamespace(vocab_size=VOCAB)
    made.server_args.enable_deterministic_inference = False
    made.rid_to_state = {"r": SimpleNamespace(time_stats=SimpleNamespace(set_tokenize_finish_time=int))}
    tokenized = made._create_tokenized_object(request({"min_new_tokens": 2}), "", [1])
    assert tokenized.sampling_params.stop_token_ids == {5}
    with pytest.raises(ValueError, match="top_k must"):
        made._create_tokenized_object(request({"top_k": 2**31}), "", [1])


def test_a_prompt_that_the_scheduler_cannot_take():
    check_prompt([5] * 9, VOCAB, 10)
    check_prompt([0, 99] * 100, VOCAB, None)
    with pytest.raises(ValueError, match="The prompt is empty"):
        check_prompt([], VOCAB, None)
    with pytest.raises(ValueError, match="10 tokens.*fewer than 10"):
        check_prompt([5] * 10, VOCAB, 10)
    for wrong in ([5, 100], [-1], [2**70]):
        with pytest.raises(ValueError, match="input_ids must be"):
            check_prompt(wrong, VOCAB, 10)


@pytest.mark.parametrize("options", [{"input_ids": [1]}, {"input_ids": [[1]]}])
def test_samples_by_the_million_are_refused(options):
    """The engine makes all of them at once, and its memory ends."""
    for params in ({"n": 10**9}, [{"n": 2**31}]):
        with pytest.raises(ValueError, match="n must be at most"):
            GenerateReqInput(**options, sampling_params=params).normalize_batch_and_arguments()


def test_a_reference_written_in_numbers_is_one_too():
    hidden = (REFERS % nested(20)).replace("$ref", "\\u0024ref")
    with pytest.raises(ValueError, match="json_schema must have at most 4000 objects and arrays"):
        sampling(json_schema=hidden)


@pytest.mark.parametrize("each", ['{"type":"array","items":', '{"type":"object","additionalProperties":', '{"not":'])
def test_what_may_nest_is_compiled(each):
    """In 0.3 s at most; 1000 levels took 52 s, and of 400,000 both workers died."""
    schema = each * 99 + "{}" + "}" * 99
    sampling(json_schema=schema)
    vocab = xgrammar.TokenizerInfo([chr(i) for i in range(128)], stop_token_ids=[0])
    xgrammar.GrammarCompiler(vocab).compile_json_schema(schema)


def door(mode: DisaggregationMode, **options) -> TokenizerManager:
    """One that has what it looks at requests with."""
    made = manager(mode)
    made.model_config = SimpleNamespace(vocab_size=VOCAB, hidden_size=3)
    made.max_req_input_len, made.mm_processor, made.tokenizer = 9, None, object()
    of_server = {
        "disaggregation_decode_enable_radix_cache": False,
        "allow_auto_truncate": False,
        "disaggregation_transfer_backend": "nixl",
        "keyed": False,
        "enable_deterministic_inference": False,
        "disable_radix_cache": False,
    }
    vars(made.server_args).update(of_server | options)
    return made


def normal(**options) -> GenerateReqInput:
    obj = GenerateReqInput(**{"input_ids": [1, 2, 3], **options})
    obj.normalize_batch_and_arguments()
    return obj


def test_a_worker_of_a_pair_must_be_told_of_the_other():
    """The engine's DP controller ends with a request that has no room, where it chooses ranks by it."""
    for options, missing in (
        ({}, {"prefill": "bootstrap_room", "decode": "bootstrap_room"}),
        ({"bootstrap_room": 5}, {"decode": "bootstrap_host"}),
        ({"bootstrap_room": 5, "bootstrap_host": "h"}, {}),
    ):
        for mode in DisaggregationMode:
            door(mode, disaggregation_transfer_backend="fake")._validate_rid_not_in_flight(normal(**options))
            if mode.value in missing:
                with pytest.raises(ValueError, match=f"{missing[mode.value]} is missing: send"):
                    door(mode)._validate_rid_not_in_flight(normal(**options))
            else:
                door(mode)._validate_rid_not_in_flight(normal(**options))


def test_a_decode_worker_with_a_cache_cuts_no_prompt():
    """Nor would prefill, at the same token: `test_prompts_compared.py`."""
    room = {"bootstrap_room": 5, "bootstrap_host": "h"}
    for mode, keeps in itertools.product(DisaggregationMode, (False, True)):
        options = {"allow_auto_truncate": True, "disaggregation_decode_enable_radix_cache": keeps}
        made = door(mode, **options)
        if keeps and mode == DisaggregationMode.DECODE:
            with pytest.raises(ValueError, match="has 9 tokens, and this worker takes fewer than 9"):
                made._validate_rid_not_in_flight(normal(input_ids=[1] * 9, **room))
        elif not keeps:
            made._validate_rid_not_in_flight(normal(input_ids=[1] * 9, **room))
        made._validate_rid_not_in_flight(normal(input_ids=[1] * 8, **room))


def test_an_adapter_is_named_and_not_numbered():
    """The engine ends for an id that it has not given. Without adapters, it keeps KV apart by it."""
    alone = DisaggregationMode.NULL
    with pytest.raises(ValueError, match="name the adapter in lora_path"):
        door(alone, enable_lora=True)._validate_rid_not_in_flight(normal(lora_id="x"))
    named = normal(lora_id="x", lora_path="a")
    door(alone, enable_lora=True)._validate_rid_not_in_flight(named)
    assert named.lora_id is None
    door(alone)._validate_rid_not_in_flight(normal(lora_id="x"))


def test_each_prompt_has_one_adapter():
    """What is left over of a list is acquired, and no answer releases it."""
    made, room = door(DisaggregationMode.PREFILL, enable_lora=True), {"bootstrap_room": 5}
    for path, n in (("a", 1), (["a", None], 1), (["a", "b"], 2)):
        made._validate_rid_not_in_flight(normal(input_ids=[[1], [2]], lora_path=path, sampling_params={"n": n}, **room))
    for path, n in ((["a"], 1), (["a", "b", "c"], 1), ([], 1), (["a", "b", "c"], 2)):
        with pytest.raises(ValueError, match="lora_path must have an entry for each of the 2 prompts"):
            made._validate_rid_not_in_flight(
                normal(input_ids=[[1], [2]], lora_path=path, sampling_params={"n": n}, **room)
            )


def test_a_worker_without_a_tokenizer_is_not_asked_for_one():
    for params in ({"stop": "a"}, {"stop": ""}, {"stop_regex": ["a"]}, {"min_new_tokens": 1}):
        for mode in DisaggregationMode:
            made = door(mode, disaggregation_transfer_backend="fake")
            made._validate_rid_not_in_flight(normal(sampling_params=params))
            made.tokenizer = None
            # Prefill makes one token, and looks at no text.
            if mode == DisaggregationMode.PREFILL and "min_new_tokens" not in params:
                made._validate_rid_not_in_flight(normal(sampling_params=params))
                continue
            with pytest.raises(ValueError, match=f"{next(iter(params))} needs a tokenizer"):
                made._validate_rid_not_in_flight(normal(sampling_params=params))
    check_without_tokenizer({"stop": [], "stop_regex": None, "min_new_tokens": 0, "stop_token_ids": [1]}, True)


def test_embeddings_of_a_prompt():
    """The scheduler makes a tensor of those of a whole batch."""
    good, alone = [[0.5, 1.0, -1.0], [1e30, 0.0, 0.0]], DisaggregationMode.NULL
    values = [[[value, 0.5, 0.5]] for value in (NAN, -INF, 1e39)]
    for wrong in ([], [[0.5]], [*good, [0.5]], [[0.5] * 4], *values, 5, ["abc"]):
        with pytest.raises(ValueError, match="input_embeds must be"):
            check_embeds(wrong, 3)
    made = door(alone, disable_radix_cache=True)
    made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=good))
    # From a program that has the engine in itself.
    made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=np.array(good)))
    with pytest.raises(ValueError, match="a list of 3 finite numbers for each token"):
        made._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=[good, [[0.5]]]))
    # The engine says that it takes none, and what to do.
    door(alone)._validate_rid_not_in_flight(normal(input_ids=None, input_embeds=[[0.5]]))


def test_labels_that_the_metrics_do_not_have(monkeypatch):
    """With one of those, the first answer ends the engine's process. What the metrics have may be given."""
    known = {"model_name": "m", "tenant": ""}
    check_labels({}, known), check_labels({"tenant": "\U0001f600", "model_name": "b"}, known)
    # Half of such a pair, which JSON can bring: /metrics could not be read any more.
    with pytest.raises(ValueError, match="surrogates"):
        check_labels({"tenant": "a \ud800"}, known)
    with pytest.raises(ValueError, match="custom_labels has 'a, b'.*--tokenizer-metrics-allowed-custom-labels"):
        check_labels({"b": "1", "tenant": "x", "a": "1"}, known)
    for mode in DisaggregationMode:
        worker = manager(mode)
        worker.enable_metrics, worker.metrics_collector = True, SimpleNamespace(labels=known)
        obj = request(custom_labels={"a": "b"}, bootstrap_host="10.0.0.1", bootstrap_room=5)
        with pytest.raises(ValueError, match="custom_labels"):
            worker._validate_rid_not_in_flight(obj)
        # Nobody reads them.
        worker.enable_metrics = False
        worker.metrics_collector = None
        worker._admission = lambda: SimpleNamespace(check=lambda obj: None)
        worker._validate_rid_not_in_flight(obj)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"routed_dp_rank": 0.5}, "routed_dp_rank has a wrong type"),
        ({"custom_labels": {"a": 5}}, "custom_labels has a wrong type"),
        ({"input_ids": 5}, "input_ids has a wrong type"),
        ({"stream": "perhaps"}, "stream has a wrong type"),
    ],
)
def test_a_request_that_nobody_has_given_types(monkeypatch, options, said):
    """The route for Vertex AI makes it of whatever the client has sent; all others have been checked."""
    worker = manager(DisaggregationMode.PREFILL)
    worker.own_states = {}

    async def generate(self, obj, request):
        if obj.untyped:
            obj.normalize_batch_and_arguments()
        yield {"meta_info": {}}

    async def ask(endpoint, **options) -> GenerateReqInput:
        obj = GenerateReqInput(**{"input_ids": [1], **options})
        async for _ in worker.generate_request(obj, SimpleNamespace(scope={"endpoint": endpoint})):
            pass
        return obj

    def vertex_generate() -> None:
        pass

    monkeypatch.setattr(ENGINE, "generate_request", generate)
    with pytest.raises(ValueError, match=said):
        asyncio.run(ask(vertex_generate, **options))
    assert asyncio.run(ask(vertex_generate, routed_dp_rank="1")).routed_dp_rank == 1
    # The engine serves what is null.
    assert asyncio.run(ask(vertex_generate, stream=None, log_metrics=None)).log_metrics is None
    asyncio.run(ask(ask, **options))
    worker.disaggregation_mode = DisaggregationMode.NULL
    with pytest.raises(ValueError, match=said):
        asyncio.run(ask(vertex_generate, **options))
    with pytest.raises(ValueError, match=said):
        check_types(GenerateReqInput(**options))


def test_the_bound_of_alternatives_is_that_of_the_metadata():
    default = inspect.signature(MetadataBuffers).parameters["max_top_logprobs_num"].default
    assert request_checks.MAX_TOP_LOGPROBS == default


@pytest.mark.parametrize("path", [["a"], ["a", None, "b"]])
def test_a_list_of_adapters_that_does_not_fit_holds_none(path):
    """Its prompts are one, or two."""

    async def test():
        prefill = with_adapters(Manager(*MODES[0]))
        obj = body(1, prompts=[[1, 2]] if len(path) == 1 else [[1, 2], [3, 4]], lora_path=path)
        if len(path) == 1:
            obj.input_ids, obj.bootstrap_room = [1, 2], 11
            obj.bootstrap_host = obj.bootstrap_port = None
        with pytest.raises(ValueError, match="lora_path must"):
            await answers(prefill, obj)
        assert prefill.lora_registry.held == [] and not prefill.rid_to_state

    run(test())


@pytest.mark.parametrize("adapters", [False, True])
def test_why_a_request_with_the_id_of_an_adapter_is_refused(adapters):
    async def test():
        prefill = with_adapters(Manager(*MODES[0]))
        prefill.server_args.enable_lora = adapters
        with pytest.raises(ValueError, match="lora_id" if adapters else "input_ids must be"):
            await answers(prefill, body(1, prompts=[[99], [3]], lora_id=["x", "y"]))
        assert prefill.lora_registry.held == []

    run(test())
