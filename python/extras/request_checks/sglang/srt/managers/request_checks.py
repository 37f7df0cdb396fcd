"""What is looked at before a request goes to the scheduler, so that it is refused with status 400 and nothing is sent.

Only what ends a worker there, makes it wait for ever, or costs another request its answer: a token outside the
vocabulary, a NaN among the probabilities. Prefill and decode look at the same things, so both refuse. All else the
engine refuses itself, or serves.

Upstream: none is known for all of it; sgl-project/sglang#22175 and #28088 (merged) and #28794 (open) have one option
each.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = [
    "check_embeds",
    "check_labels",
    "check_prompt",
    "check_request",
    "check_sampling",
    "check_types",
    "check_without_tokenizer",
    "stop_tokens",
]

INT32, INT64 = 2**31 - 1, 2**63 - 1
# Where prefill's first token and its alternatives travel to decode (MetadataBuffers of the engine).
MAX_TOP_LOGPROBS = 128
# A number that is still one as a float32; and a bias that is one together with a logit, by the lowest temperature.
MAX_FLOAT, MAX_BIAS = 3e38, 1e30
# Objects and arrays of a schema: as deep as they may nest, and as many as it may have where some refer to others. What
# compiles it follows both on its stack, which ends the worker; 100 in each other take it 0.3 s, 200 2 s, 1000 52 s.
MAX_DEPTH, MAX_REFERRING = 100, 4000

_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# Any of its letters may be written as its number.
_REF = re.compile(r"\$ref|\\u00(?:24|72|65|66)", re.IGNORECASE)
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_sampling(
    params: SamplingParams, vocab_size: int, *, stream: bool = False, deterministic: bool = False
) -> None:
    """Raise ValueError for what the engine's own checks let pass, and its batches cannot compute with.

    params: of one prompt, after those checks. deterministic: whether its seed is used.
    """
    for name, problem in _problems(params, vocab_size, stream, deterministic):
        if problem:
            raise ValueError(f"{name} {problem}.")


def _problems(
    params: SamplingParams, vocab_size: int, stream: bool, deterministic: bool
) -> Iterator[tuple[str, str | None]]:
    # Not 5.0, with which the engine cuts a list.
    whole = params.max_new_tokens is None or isinstance(params.max_new_tokens, Integral)
    yield "max_new_tokens", None if whole else "must be a whole number"
    # By infinity, what a grammar forbids is divided into a NaN.
    yield "temperature", None if 0 <= params.temperature <= MAX_FLOAT else f"must be a number to {MAX_FLOAT:g}"
    yield "top_k", None if params.top_k <= INT32 else f"must be a number to {INT32}"
    yield "min_new_tokens", None if params.min_new_tokens <= INT32 else f"must be a number to {INT32}"
    # The engine divides by it. By less than this, and a temperature, a logit may become infinite.
    yield "repetition_penalty", None if params.repetition_penalty >= 1e-20 else "must be at least 1e-20"
    if deterministic:
        seed = params.sampling_seed
        fits = seed is None or (_is_whole(seed) and -INT64 - 1 <= seed <= INT64)
        yield "sampling_seed", None if fits else "must be a whole number of 64 bits"
    if stream and params.stream_interval:
        yield "stream_interval", None if isinstance(params.stream_interval, Real) else "must be a number"
    # The detokenizer.
    yield "skip_special_tokens", None if isinstance(params.skip_special_tokens, bool) else "must be true or false"
    grouped = isinstance(params.spaces_between_special_tokens, Hashable)
    yield "spaces_between_special_tokens", None if grouped else "must be true or false"
    strings = all(isinstance(stop, str) for stop in params.stop_strs)
    yield "stop", None if strings else "must be a string or a list of strings"
    yield "stop_regex", _wrong_patterns(params.stop_regex_strs)
    yield "logit_bias", _wrong_biases(params.logit_bias)
    yield "json_schema", _wrong_schema(params.json_schema)
    yield "structural_tag", _wrong_schema(params.structural_tag)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())


def _wrong_patterns(patterns: Any) -> str | None:
    """The engine parses them, and compiles them when it has a token."""
    try:
        for pattern in patterns:
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        return f"must be a regular expression: {e}"
    return None


def _wrong_biases(biases: Any) -> str | None:
    if biases is None:
        return None
    if not isinstance(biases, Mapping):
        return "must be an object of token ids and numbers"
    # Minus infinity forbids a token.
    wrong = [
        bias
        for bias in biases.values()
        if bias != -math.inf and not (isinstance(bias, int | float) and -MAX_FLOAT <= bias <= MAX_BIAS)
    ]
    return f"must have values from {-MAX_FLOAT:g} to {MAX_BIAS:g}, got {wrong[0]!r:.40}" if wrong else None


def _wrong_schema(schema: Any) -> str | None:
    """What of JSON ends its compiler. Whether it is a schema, that says; and what is no string, the engine."""
    if not isinstance(schema, str):
        return None
    bare = _JSON_STRING.sub("", schema)
    if max(accumulate(1 if c in "[{" else -1 for c in bare if c in "[]{}"), default=0) > MAX_DEPTH:
        return f"must nest objects and arrays at most {MAX_DEPTH} deep"
    if _REF.search(schema) and bare.count("[") + bare.count("{") > MAX_REFERRING:
        return f"must have at most {MAX_REFERRING} objects and arrays where it has $ref"
    return None


def check_request(obj: GenerateReqInput, vocab_size: int, disaggregated: bool, *, keyed: bool = True) -> None:
    """Raise ValueError, naming the option, for a value of one prompt's request that the scheduler cannot work with.

    keyed: whether KV is kept under the request's key, by its priority. Its prompt is for `check_prompt`, and its
    sampling parameters for `check_sampling`.
    """
    for name in ("custom_logit_processor", "lora_path", "top_logprobs_num", *(("extra_key",) if keyed else ())):
        value = getattr(obj, name)
        # An empty one is none to the engine, but as a number or a key.
        if isinstance(value, list) and (value or name in ("top_logprobs_num", "extra_key")):
            raise ValueError(f"{name} must be one value, or for several prompts a list with one for each.")
    if keyed and not -INT64 - 1 <= (obj.priority or 0) <= INT64:
        raise ValueError("priority must be a whole number of 64 bits.")
    # Of all in a batch of which one asks for logprobs.
    _check_tokens("token_ids_logprob", obj.token_ids_logprob or (), vocab_size)
    if (obj.top_logprobs_num or 0) > vocab_size:
        raise ValueError(f"top_logprobs_num must be at most {vocab_size}, got {obj.top_logprobs_num}.")
    if obj.return_logprob and (obj.logprob_start_len or 0) < -1:
        raise ValueError(f"logprob_start_len must be at least -1, got {obj.logprob_start_len}.")
    if disaggregated:
        _check_pair(obj)


def _check_pair(obj: GenerateReqInput) -> None:
    if obj.bootstrap_host is not None and not _is_host(obj.bootstrap_host):
        raise ValueError(f"bootstrap_host must be the name or the address of a host, got {obj.bootstrap_host!r:.80}.")
    # It travels as 64 bits. 0 is for warm-ups: decode reads it as metadata that is not there yet.
    warmup = obj.bootstrap_host in (None, FAKE_BOOTSTRAP_HOST)
    if obj.bootstrap_room is not None and not (0 if warmup else 1) <= obj.bootstrap_room <= INT64:
        raise ValueError(f"bootstrap_room must be from 1 to {INT64}, got {obj.bootstrap_room!r:.80}.")
    if obj.bootstrap_host != FAKE_BOOTSTRAP_HOST and (obj.rid or "").startswith(HEALTH_CHECK_RID_PREFIX):
        # A busy scheduler drops it without a word.
        raise ValueError(f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}, got {obj.rid!r:.80}.")
    if obj.return_logprob and not 0 <= (obj.top_logprobs_num or 0) <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs_num must be from 0 to at most {MAX_TOP_LOGPROBS} with PD disaggregation, "
            f"got {obj.top_logprobs_num}."
        )
    if obj.session_params:
        raise ValueError("session_params cannot be used with PD disaggregation.")


def _is_host(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if _HOST_NAME.fullmatch(value):
        return True
    try:
        ipaddress.ip_address(value[1:-1] if value.startswith("[") and value.endswith("]") else value)
        return True
    except ValueError:
        return False


@cache
def _types() -> TypeAdapter:
    return TypeAdapter(GenerateReqInput)


def check_types(obj: GenerateReqInput) -> None:
    """Give the fields of a request the types that they are declared with, as FastAPI does. Raises ValueError.

    Of a request that the engine has made of an object without types, before it is normalised. What is null there it
    serves as what is left out.
    """
    fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        typed = _types().validate_python(given)
    except ValidationError as e:
        wrong = e.errors()[0]
        raise ValueError(f"{wrong['loc'][0]} has a wrong type: {wrong['msg']}.") from None
    for name in given:
        setattr(obj, name, getattr(typed, name))


def check_labels(labels: Mapping[str, str], known: Collection[str]) -> None:
    """Raise ValueError for labels of metrics that are not ``known``: with those, the first answer ends the worker.

    And for half a character, which JSON can bring and UTF-8 has not: /metrics could not be read any more.
    """
    unknown = sorted(set(labels).difference(known))
    if unknown:
        raise ValueError(
            f"custom_labels has {', '.join(unknown)!r:.80}, which this worker's metrics do not have. Leave it out, or "
            "start all workers with --tokenizer-metrics-allowed-custom-labels and its name."
        )
    "".join(labels.values()).encode()


def check_without_tokenizer(sampling_params: Mapping, decodes: bool) -> None:
    """Raise ValueError for what a scheduler without a tokenizer would ask one for. decodes: it is no prefill."""
    for name in ("stop", "stop_regex", "min_new_tokens") if decodes else ("min_new_tokens",):
        value = sampling_params.get(name)
        # An empty string is one to look for.
        if value or value == "":
            raise ValueError(
                f"{name} needs a tokenizer, and this worker has none (--skip-tokenizer-init). Leave it out."
            )


def stop_tokens(values: set | None, vocab_size: int) -> set[int] | None:
    """Those that a token can be. All of a batch have a place among the logits where one has ``min_new_tokens``."""
    tokens = {int(value) for value in values or () if _is_whole(value) and 0 <= value < vocab_size}
    return tokens or None


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    # A prompt is long: its bounds are found without a loop.
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}, got {wrong}.")


def check_prompt(token_ids: Any, vocab_size: int, max_input_len: int | None) -> None:
    """Raise ValueError for a prompt that the scheduler would not take. max_input_len: None for any length."""
    if len(token_ids) == 0:
        # The engine looks at whole batches only; alone in a step, it ends the scheduler.
        raise ValueError("The prompt is empty: input_ids has no token.")
    _check_tokens("input_ids", token_ids, vocab_size)
    if max_input_len is not None and len(token_ids) >= max_input_len:
        raise ValueError(
            f"The prompt has {len(token_ids)} tokens, and this worker takes fewer than {max_input_len}. "
            "Use a shorter one."
        )


def check_embeds(embeds: Any, width: int) -> None:
    """Raise ValueError for a prompt of embeddings of which the engine can make no tensor, or none for the model."""
    try:
        # A sum is infinite, or no number, where one of them is.
        if len(embeds) and all(len(row) == width and sum(map(abs, row)) <= MAX_FLOAT for row in embeds):
            return
    except TypeError:
        pass
    raise ValueError(f"input_embeds must be a list with a list of {width} finite numbers for each token.")
