"""Checks of a request before it goes to the scheduler; failures are answered with status 400.

Only for values that end a worker, make it hang, or fail another request: a token outside the vocabulary, a NaN among
the probabilities. Prefill and decode run the same checks, so both refuse. The engine refuses or serves everything else.

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
# The first token's logprobs are transferred from prefill to decode in the engine's MetadataBuffers of this size.
MAX_TOP_LOGPROBS = 128
# The largest finite float32; the largest bias that stays finite when added to a logit and divided by the temperature.
MAX_FLOAT, MAX_BIAS = 3e38, 1e30
# Depth of a schema's objects and arrays; their number if it has references. The grammar compiler recurses over both,
# and a stack overflow ends the worker. Compile times of 100, 200 and 1000 nested references: 0.3 s, 2 s, 52 s.
MAX_DEPTH, MAX_REFERRING = 100, 4000

_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# JSON may escape any of its characters.
_REF = re.compile(r"\$ref|\\u00(?:24|72|65|66)", re.IGNORECASE)
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_sampling(
    params: SamplingParams, vocab_size: int, *, stream: bool = False, deterministic: bool = False
) -> None:
    """Raise ValueError for values that pass the engine's checks but fail in its batches.

    params: of one prompt, after the engine's checks. deterministic: whether its seed is used.
    """
    for name, problem in _problems(params, vocab_size, stream, deterministic):
        if problem:
            raise ValueError(f"{name} {problem}.")


def _problems(
    params: SamplingParams, vocab_size: int, stream: bool, deterministic: bool
) -> Iterator[tuple[str, str | None]]:
    # The engine slices a list with it, so 5.0 fails.
    whole = params.max_new_tokens is None or isinstance(params.max_new_tokens, Integral)
    yield "max_new_tokens", None if whole else "must be a whole number"
    # Infinity would turn a token forbidden by a grammar into NaN.
    yield "temperature", None if 0 <= params.temperature <= MAX_FLOAT else f"must be a number to {MAX_FLOAT:g}"
    yield "top_k", None if params.top_k <= INT32 else f"must be a number to {INT32}"
    yield "min_new_tokens", None if params.min_new_tokens <= INT32 else f"must be a number to {INT32}"
    # A divisor: with a lower value and a temperature, a logit may become infinite.
    yield "repetition_penalty", None if params.repetition_penalty >= 1e-20 else "must be at least 1e-20"
    if deterministic:
        seed = params.sampling_seed
        fits = seed is None or (_is_whole(seed) and -INT64 - 1 <= seed <= INT64)
        yield "sampling_seed", None if fits else "must be a whole number of 64 bits"
    if stream and params.stream_interval:
        yield "stream_interval", None if isinstance(params.stream_interval, Real) else "must be a number"
    # Read by the detokenizer.
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
    """The engine parses them, and compiles them when the first token arrives."""
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
    """JSON that would end the compiler. The compiler checks the schema itself, and the engine the type."""
    if not isinstance(schema, str):
        return None
    bare = _JSON_STRING.sub("", schema)
    if max(accumulate(1 if c in "[{" else -1 for c in bare if c in "[]{}"), default=0) > MAX_DEPTH:
        return f"must nest objects and arrays at most {MAX_DEPTH} deep"
    if _REF.search(schema) and bare.count("[") + bare.count("{") > MAX_REFERRING:
        return f"must have at most {MAX_REFERRING} objects and arrays if it has $ref"
    return None


def check_request(obj: GenerateReqInput, vocab_size: int, disaggregated: bool, *, keyed: bool = True) -> None:
    """Raise ValueError, with the option's name, for a value that the scheduler cannot handle. For one prompt.

    keyed: whether KV is stored by the request's extra_key, with its priority. `check_prompt` checks the prompt,
    `check_sampling` the sampling parameters.
    """
    for name in ("custom_logit_processor", "lora_path", "top_logprobs_num", *(("extra_key",) if keyed else ())):
        value = getattr(obj, name)
        # The engine ignores an empty list, except as a number or a key.
        if isinstance(value, list) and (value or name in ("top_logprobs_num", "extra_key")):
            raise ValueError(f"{name} must be one value, or for several prompts a list with one for each.")
    if keyed and not -INT64 - 1 <= (obj.priority or 0) <= INT64:
        raise ValueError("priority must be a whole number of 64 bits.")
    # Read for all requests of a batch if one asks for logprobs.
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
    # Transferred as 64 bits. 0 is for warm-ups: decode reads it as metadata that has not arrived yet.
    warmup = obj.bootstrap_host in (None, FAKE_BOOTSTRAP_HOST)
    if obj.bootstrap_room is not None and not (0 if warmup else 1) <= obj.bootstrap_room <= INT64:
        raise ValueError(f"bootstrap_room must be from 1 to {INT64}, got {obj.bootstrap_room!r:.80}.")
    if obj.bootstrap_host != FAKE_BOOTSTRAP_HOST and (obj.rid or "").startswith(HEALTH_CHECK_RID_PREFIX):
        # A busy scheduler silently drops it.
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
    """Convert the fields of a request to their declared types, as FastAPI does. Raises ValueError.

    For a request that the engine has made from an untyped object; called before it is normalised. Null counts as
    absent.
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
    """Raise ValueError for metric labels that are not ``known``: the first answer with one would end the worker.

    Also for a lone surrogate, which JSON allows and UTF-8 does not: /metrics would fail from then on.
    """
    unknown = sorted(set(labels).difference(known))
    if unknown:
        raise ValueError(
            f"custom_labels has {', '.join(unknown)!r:.80}, which this worker's metrics do not have. Leave it out, or "
            "start all workers with --tokenizer-metrics-allowed-custom-labels and its name."
        )
    "".join(labels.values()).encode()


def check_without_tokenizer(sampling_params: Mapping, decodes: bool) -> None:
    """Raise ValueError for options that need a tokenizer, which the scheduler does not have. decodes: not a prefill."""
    for name in ("stop", "stop_regex", "min_new_tokens") if decodes else ("min_new_tokens",):
        value = sampling_params.get(name)
        # An empty string is a stop string too.
        if value or value == "":
            raise ValueError(
                f"{name} needs a tokenizer, and this worker has none (--skip-tokenizer-init). Leave it out."
            )


def stop_tokens(values: set | None, vocab_size: int) -> set[int] | None:
    """Token ids within the vocabulary. With ``min_new_tokens`` in a batch, the engine indexes logits by all of them."""
    tokens = {int(value) for value in values or () if _is_whole(value) and 0 <= value < vocab_size}
    return tokens or None


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    # Without a Python loop, since a prompt is long.
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}, got {wrong}.")


def check_prompt(token_ids: Any, vocab_size: int, max_input_len: int | None) -> None:
    """Raise ValueError for a prompt that the scheduler would refuse. max_input_len: None for no limit."""
    if len(token_ids) == 0:
        # The engine checks whole batches only; alone in a step, it ends the scheduler.
        raise ValueError("The prompt is empty: input_ids has no token.")
    _check_tokens("input_ids", token_ids, vocab_size)
    if max_input_len is not None and len(token_ids) >= max_input_len:
        raise ValueError(
            f"The prompt has {len(token_ids)} tokens, and this worker takes fewer than {max_input_len}. "
            "Use a shorter one."
        )


def check_embeds(embeds: Any, width: int) -> None:
    """Raise ValueError for embeddings that do not form a finite tensor of the model's width."""
    try:
        # The sum is infinite or NaN if an element is.
        if len(embeds) and all(len(row) == width and sum(map(abs, row)) <= MAX_FLOAT for row in embeds):
            return
    except TypeError:
        pass
    raise ValueError(f"input_embeds must be a list with a list of {width} finite numbers for each token.")
