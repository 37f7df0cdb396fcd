"""What the engine serves of any option passes, whoever builds the request."""

from __future__ import annotations

import inspect
import math
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from sglang.srt.disaggregation.refusal import RefusedRooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_checks import check_sampling
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability import metrics_collector
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 100
NAN, INF = math.nan, math.inf


def manager() -> TokenizerManager:
    """A tokenizer manager of a server by itself that has not been started."""
    made = object.__new__(TokenizerManager)
    made.refused_rooms, made.rid_to_state, made.mm_processor = RefusedRooms(), {}, None
    made.disaggregation_mode, made.tokenizer = DisaggregationMode.NULL, None
    made.model_config = SimpleNamespace(vocab_size=VOCAB)
    made.server_args = SimpleNamespace(
        disaggregation_decode_enable_radix_cache=False,
        keyed=False,
        allow_auto_truncate=False,
        enable_lora=False,
    )
    return made


VALUES = [
    *(None, True, False, 0, 1, -1, -5, 2, 5000, 1.5, -0.5, 5.0, 1e-5, 1e-30, 1e31, 1e38, 1e39, NAN, INF, -INF),
    *(2**31, 2**62, 2**63, 2**70, -(2**63), "", "1", "a", "a(", "{}", [], [1], ["a"], [None], [[1]], {}, {"a": 1}),
    *("(?<=a*)b", ["a", "(?<=a*)b"]),
    *({"5": value} for value in (1, -1, True, 1e30, 1e31, 1e38, -1e38, 1e39, -1e39, NAN, INF, -INF, "1", None)),
    *({name: 1} for name in (" 5", "+5", "100", "-1", "x")),
]
# Of what the engine's own checks let pass, what ends its scheduler or its detokenizer, alone or beside others: each was
# tried on a server.
NOT_SERVED = {
    # It cuts a list with it.
    "max_new_tokens": lambda value: not isinstance(value, int),
    "temperature": lambda value: not value <= 3e38,
    "top_k": lambda value: not value <= 2**31 - 1,
    "min_new_tokens": lambda value: value > 2**31 - 1,
    "repetition_penalty": lambda value: value < 1e-20,
    "skip_special_tokens": lambda value: not isinstance(value, bool),
    "spaces_between_special_tokens": lambda value: isinstance(value, dict | list),
    "stream_interval": lambda value: value and not isinstance(value, int | float),
    "stop_regex": lambda value: "(?<=a*)b" in value,
    "logit_bias": lambda value: (
        not isinstance(value, dict)
        or not all(isinstance(bias, int | float) and (bias == -INF or -3e38 <= bias <= 1e30) for bias in value.values())
    ),
}


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def checked(params: dict) -> SamplingParams | None:
    """What the engine's checks let pass; None of what they do not."""
    try:
        made = SamplingParams(**params)
        made.normalize(Tokenizer())
        made.verify(VOCAB)
        return made
    except Exception:
        return None


def refusal(made: SamplingParams) -> str:
    """Why it is refused; empty if it is not."""
    try:
        check_sampling(made, VOCAB, stream=True)
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", inspect.signature(SamplingParams).parameters)
def test_what_the_engine_serves_passes_and_no_more(name, temperature):
    for value in VALUES:
        params = {"temperature": temperature, name: value}
        if (made := checked(params)) is not None:
            none = value is None and name != "skip_special_tokens"
            fatal = name in NOT_SERVED and not none and (name != "top_k" or temperature) and NOT_SERVED[name](value)
            said = refusal(made)
            assert bool(said) == bool(fatal) and (not fatal or said.startswith(f"{name} must")), (params, said)


LABELS = [
    None,
    {},
    {"tenant": "a"},
    {"tenant": "a", "model_name": "b"},
    {"a": "b"},
    {"tenant": "a", "a": "b"},
    {"": ""},
]


def test_labels_that_the_engines_metrics_take_pass_and_no_more(monkeypatch):
    """The engine's own metrics, with each of its ways to count: what one does not take ends the process of a worker."""
    with monkeypatch.context() as patch:
        # Not among those of this process, which other tests look at.
        registry = prometheus_client.CollectorRegistry()
        for kind in (prometheus_client.Counter, prometheus_client.Histogram):
            patch.setattr(prometheus_client, kind.__name__, partial(kind, registry=registry))
        args = SimpleNamespace(prompt_tokens_buckets=None, generation_tokens_buckets=None)
        known = {"model_name": "m", "tenant": ""}
        collector = metrics_collector.TokenizerMetricsCollector(args, known, collect_tokens_histogram=True)

    def counts(labels: dict[str, str]) -> bool:
        try:
            collector.observe_time_to_first_token(labels, 1.0)
            collector.observe_inter_token_latency(labels, 1.0, 1)
            collector.observe_one_aborted_request(labels)
        except ValueError:
            return False
        return True

    made = manager()
    made.enable_metrics, made.metrics_collector = True, collector
    for labels in LABELS:
        obj = GenerateReqInput(input_ids=[1], custom_labels=labels)
        obj.normalize_batch_and_arguments()
        try:
            made._validate_rid_not_in_flight(obj)
            passes = True
        except ValueError as e:
            passes = False
            assert "custom_labels" in str(e)
        assert passes == counts({**known, **(labels or {})}), labels


def chat(**options) -> dict:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **options).to_sampling_params([], {})


def completion(**options) -> dict:
    serving = object.__new__(OpenAIServingCompletion)
    return serving._build_sampling_params(CompletionRequest(model="m", prompt="a", **options))


def response(**options) -> dict:
    return ResponsesRequest(model="m", input="a", **options).to_sampling_params(100, {"stop_token_ids": [1]})


@pytest.mark.parametrize(
    ("build", "protocol"),
    [(chat, ChatCompletionRequest), (completion, CompletionRequest), (response, ResponsesRequest)],
    ids=["chat", "completions", "responses"],
)
def test_options_of_openai(build, protocol):
    """Each value of each field that the endpoint takes and the engine serves."""
    tried = set()
    for field in protocol.model_fields:
        for value in VALUES:
            for more in ({}, {"temperature": 0}):
                try:
                    params = build(**{**more, field: value})
                except Exception:
                    continue
                fatal = any(
                    NOT_SERVED[name](params[name])
                    for name in NOT_SERVED
                    if params.get(name) is not None and (name != "top_k" or params["temperature"] >= 1e-6)
                )
                made = checked(params)
                if made is not None and not fatal:
                    assert not refusal(made), (field, value)
                    tried.add(field)
    assert {"temperature", "top_p", "top_k", "stop"} <= tried
