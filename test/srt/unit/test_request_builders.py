"""Whoever builds a request in the engine: its options are known, and what the engine serves of them passes."""

from __future__ import annotations

import ast
import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import sglang
from sglang.srt.disaggregation.refusal import RefusedRooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TranscriptionRequest,
)
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_transcription import OpenAIServingTranscription
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_checks import SAMPLING_CHECKS, check_names, check_request
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability import metrics_collector
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pd_radix.patching import syntax

VOCAB = 100
NAN, INF = math.nan, math.inf
ENGINE = Path(sglang.__path__[0])
# The engine's Ollama endpoint asks for it, and the engine has no such option.
UNKNOWN_TO_THE_ENGINE = {"seed"}


# ---- names ----


def _is_params(node: ast.expr) -> bool:
    """Whether an expression is called sampling parameters, as a name, an attribute, or an entry."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "sampling_params"
    return "sampling_params" in (getattr(node, "id", "") or getattr(node, "attr", "")).lower()


def _text(node: ast.expr | None) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def _keys(node: ast.AST) -> set[str]:
    """Of a dictionary that is written out, with those in it that are unpacked or chosen from."""
    dicts = [one for one in ast.walk(node) if isinstance(one, ast.Dict)]
    inner = {id(value) for one in dicts for value in one.values if isinstance(value, ast.Dict)}
    return {key for one in dicts if id(one) not in inner for name in one.keys for key in _text(name)}


def put(tree: ast.AST) -> Iterator[str]:
    """What a file puts into sampling parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and _is_params(target.value):
                    yield from _text(target.slice)
                elif _is_params(target):
                    yield from _keys(node.value)
        elif isinstance(node, ast.keyword) and "sampling_params" in (node.arg or ""):
            yield from _keys(node.value) if isinstance(node.value, ast.Dict) else ()
        elif isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if _text(name) == {"sampling_params"}:
                    yield from _keys(value)
        elif isinstance(node, ast.FunctionDef) and ("sampling_params" in node.name or node.name == "to_srt_kwargs"):
            for inside in ast.walk(node):
                if isinstance(inside, ast.Return | ast.Assign) and isinstance(inside.value, ast.Dict):
                    # Or their names: a table of what a client calls them.
                    names = {name for value in inside.value.values for name in _text(value)}
                    yield from names or _keys(inside.value)


def taken_out(tree: ast.AST) -> Iterator[str]:
    """What a processor takes out of sampling parameters again: the constants with which it calls what does that."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    ours = {f.name for f in functions if "sampling_param" in f.name and ".pop(" in ast.unparse(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ours or (node.func.attr == "pop" and _is_params(node.func.value)):
                for argument in node.args:
                    yield from _text(argument)


def found(scan, *folders: str) -> dict[str, set[str]]:
    """Where each name is found."""
    names = defaultdict(set)
    for folder in folders:
        for file in sorted((ENGINE / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if "sampling_param" in text or "to_srt_kwargs" in text:
                for name in scan(syntax.parse(text)):
                    names[name].add(str(file.relative_to(ENGINE)))
    return names


def test_every_option_that_the_engine_gives_a_request_is_known():
    given, processors = found(put, "srt", "lang"), found(taken_out, "srt/multimodal")
    assert set(processors) == {"language", "timestamp_granularities"}
    unknown = set(given) - set(SAMPLING_CHECKS) - set(processors)
    assert unknown == UNKNOWN_TO_THE_ENGINE, {name: given[name] for name in unknown}
    assert given["seed"] == {"srt/entrypoints/ollama/serving.py"}
    # What is found at all.
    for file in ("openai/protocol", "openai/serving_completions", "openai/serving_transcription", "http_server"):
        assert any(f"srt/entrypoints/{file}.py" in where for where in given.values()), file
    assert {"temperature", "max_new_tokens", "json_schema", "sampling_seed", "stop_regex"} <= set(given)


# ---- what a processor takes out ----


def manager(processor: object) -> TokenizerManager:
    """A tokenizer manager of a server by itself that has not been started."""
    made = object.__new__(TokenizerManager)
    made.refused_rooms, made.rid_to_state, made.mm_processor = RefusedRooms(), {}, processor
    made.disaggregation_mode, made.is_generation = DisaggregationMode.NULL, True
    made.model_config, made.tokenizer, made.preferred_sampling_params = SimpleNamespace(vocab_size=VOCAB), None, None
    made.context_len, made.num_reserved_tokens, made.validate_total_tokens = 1000, 0, True
    made.server_args = SimpleNamespace(
        disaggregation_decode_enable_radix_cache=False,
        enable_pegaflow=False,
        enable_deterministic_inference=False,
        allow_auto_truncate=False,
        enable_lora=False,
    )
    return made


def transcription(**options) -> GenerateReqInput:
    serving = object.__new__(OpenAIServingTranscription)
    serving.extract_routing_key = lambda raw_request: None
    obj, _ = serving._convert_to_internal_request(TranscriptionRequest(audio_data=b"x", **options))
    obj.normalize_batch_and_arguments()
    return obj


@pytest.mark.parametrize("options", [{}, {"language": "en"}, {"timestamp_granularities": ["segment"]}])
def test_a_transcription_is_served(options):
    made, obj = manager(object()), transcription(**options)
    made._validate_rid_not_in_flight(obj)
    # As the engine's processor of sound does, between the two.
    for name in ("language", "timestamp_granularities"):
        obj.sampling_params.pop(name, None)
    made._validate_one_request(obj, [1, 2])


def test_what_no_processor_takes_out_is_refused():
    """A server of texts finds it before anything is sent, one of images or sound when that has been read."""
    with pytest.raises(ValueError, match="no option 'language'"):
        manager(None)._validate_rid_not_in_flight(transcription(language="en"))
    made, obj = manager(object()), transcription(language="en")
    made._validate_rid_not_in_flight(obj)
    with pytest.raises(ValueError, match="no option 'language'"):
        made._validate_one_request(obj, [1, 2])


# ---- values ----

VALUES = [
    *(None, True, False, 0, 1, -1, -5, 2, 5000, 1.5, -0.5, 5.0, 1e-5, 1e-30, 1e31, 1e38, 1e39, NAN, INF, -INF),
    *(2**31, 2**62, 2**63, 2**70, -(2**63), "", "1", "a", "a(", "{}", [], [1], ["a"], [None], [[1]], {}, {"a": 1}),
    *({"5": value} for value in (1, -1, True, 1e31, 1e38, -1e38, 1e39, -1e39, NAN, INF, -INF, "1", None)),
    *({name: 1} for name in (" 5", "+5", "100", "-1", "x")),
]
# Of what the engine's own checks let pass, what ends its scheduler or its detokenizer, alone or beside others: each was
# tried on a server. And what no grammar can be made of.
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
    "logit_bias": lambda value: (
        not isinstance(value, dict)
        or not all(isinstance(bias, int | float) and (bias == -INF or abs(bias) <= 1e38) for bias in value.values())
    ),
    "json_schema": lambda value: not isinstance(value, str),
    "regex": lambda value: not isinstance(value, str),
    "ebnf": lambda value: not isinstance(value, str),
    "structural_tag": lambda value: not isinstance(value, str) or not value,
}


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def accepts(params: dict) -> bool:
    """Whether the engine's checks let it pass."""
    try:
        made = SamplingParams(**params)
        made.normalize(Tokenizer())
        made.verify(VOCAB)
        # More requests than this test has memory for.
        return not (isinstance(params.get("n"), int | float) and params["n"] > 5000)
    except Exception:
        return False


def refusal(params: dict, **options) -> str:
    """Why a server by itself refuses it; empty if it does not."""
    obj = GenerateReqInput(input_ids=[1], sampling_params=copy.deepcopy(params), **options)
    try:
        obj.normalize_batch_and_arguments()
        check_request(obj if obj.is_single else obj[0], VOCAB, False, keyed=False)
        check_names(params)
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", inspect.signature(SamplingParams).parameters)
def test_what_the_engine_serves_passes_and_no_more(name, temperature):
    for value in VALUES:
        params = {"temperature": temperature, name: value}
        if accepts(params):
            # The engine repeats a list so many times.
            impossible = name == "n" and not (isinstance(value, int) or isinstance(value, float) and not value > 1)
            none = value is None and name != "skip_special_tokens"
            fatal = name in NOT_SERVED and not none and (name != "top_k" or temperature) and NOT_SERVED[name](value)
            assert bool(refusal(params, stream=True)) == bool(impossible or fatal), (params, refusal(params))


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

    made = manager(None)
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


OLLAMA = {
    "temperature": (0, 0.5),
    "top_p": (1.0, 0.5),
    "top_k": (0, -1, 40, None),
    "num_predict": (-1, 0, 5, None),
    "stop": (None, [], ["a"], "a"),
    "presence_penalty": (0, 1.5),
    "frequency_penalty": (0, 1.5),
    "num_ctx": (4096,),
    "seed": (1,),
}


@pytest.mark.parametrize("name", OLLAMA)
def test_options_of_ollama(name):
    serving = object.__new__(OllamaServing)
    for value in OLLAMA[name]:
        for more in ({}, {"temperature": 0}):
            params = serving._convert_options_to_sampling_params({**more, name: value})
            assert bool(refusal(params)) <= (not accepts(params)), params


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
                if accepts(params) and not fatal:
                    assert not refusal(params), (field, value)
                    tried.add(field)
    assert {"temperature", "top_p", "top_k", "stop"} <= tried
