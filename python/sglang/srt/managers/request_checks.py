"""What is looked at before a request goes to the scheduler, so that it is refused with status 400 and nothing is sent.

The engine takes these values as they come, and some end its scheduler: a token outside the vocabulary, a NaN among the
probabilities. Prefill and decode look at the same things, so both refuse. What the engine serves passes: its own checks
of ranges come after these, and what it does not look at may be anything.

Upstream: none is known for all of it; sgl-project/sglang#22175 and #28088 (merged) and #28794 (open) have one option
each.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import cache
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import GenerateReqInput

__all__ = [
    "KEY_CHECKS",
    "LOGPROB_CHECKS",
    "PAIR_CHECKS",
    "REQUEST_CHECKS",
    "SAMPLING_CHECKS",
    "UNCHECKED",
    "check_embeds",
    "check_labels",
    "check_names",
    "check_prompt",
    "check_request",
    "check_types",
    "check_without_tokenizer",
    "stop_tokens",
]

INT32, INT64 = 2**31 - 1, 2**63 - 1
# Where prefill's first token and its alternatives travel to decode (MetadataBuffers of the engine).
MAX_TOP_LOGPROBS = 128
# Numbers that are still ones as a float32, and a logit together with one.
MAX_FLOAT, MAX_BIAS = 3e38, 1e38
# Seconds, of which nanoseconds are a number too.
MAX_TIME = 1e290
# Below it, the engine samples greedily, and looks at no top_k.
GREEDY = 1e-6
# Requests that one may be split into.
MAX_SAMPLES = 4096
# Objects and arrays of a schema: as deep as they may nest, and as many as it may have where some refer to others. What
# compiles it follows both on its stack, which ends the worker; 100 in each other take it 0.3 s, 200 2 s, 1000 52 s.
MAX_DEPTH, MAX_REFERRING = 100, 4000

_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# Any of its letters may be written as its number.
_REF = re.compile(r"\$ref|\\u00(?:24|72|65|66)", re.IGNORECASE)
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# Takes a value that is not None and the size of the vocabulary; returns what is wrong with the value, or "".
Check = Callable[[Any, int], str]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _integer(value: Any, vocab_size: int) -> str:
    # Not 5.0, with which the engine cuts a list.
    return "" if isinstance(value, Integral) and int(value) >= 0 else "must be a whole number, at least 0"


def _whole(low: int, high: int) -> Check:
    def check(value: Any, vocab_size: int) -> str:
        return "" if _is_whole(value) and low <= value <= high else f"must be a whole number from {low} to {high}"

    return check


def _number(low: float, high: float, above: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high] with ``above``."""

    def check(value: Any, vocab_size: int) -> str:
        if not _is_finite(value):
            return "must be a finite number"
        if not (low < value if above else low <= value) or value > high:
            return f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
        return ""

    return check


def _text(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, str) else "must be a string"


def _texts(value: Any, vocab_size: int) -> str:
    values = value if isinstance(value, (list, tuple, set, Mapping)) else [value]
    return "" if all(isinstance(v, str) for v in values) else "must be a string or a list of strings"


def _key(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, str) else "must be a string, or for several prompts a list with one for each"


def _adapter(value: Any, vocab_size: int) -> str:
    # An empty list is none to the engine.
    return "" if value == [] else _key(value, vocab_size)


def _schema(value: Any, vocab_size: int) -> str:
    """What of JSON ends its compiler. Whether it is a schema, that says."""
    if problem := _text(value, vocab_size):
        return problem
    bare = _JSON_STRING.sub("", value)
    if max(accumulate(1 if c in "[{" else -1 for c in bare if c in "[]{}"), default=0) > MAX_DEPTH:
        return f"must nest objects and arrays at most {MAX_DEPTH} deep"
    if _REF.search(value) and bare.count("[") + bare.count("{") > MAX_REFERRING:
        return f"must have at most {MAX_REFERRING} objects and arrays where it has $ref"
    return ""


def _name(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, str) and value else "must be a string that is not empty"


def _tag(value: Any, vocab_size: int) -> str:
    return _name(value, vocab_size) or _schema(value, vocab_size)


def _flag(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _mapping(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, Mapping) else "must be an object"


def _patterns(value: Any, vocab_size: int) -> str:
    problem = _texts(value, vocab_size)
    try:
        for pattern in [] if problem else [value] if isinstance(value, str) else value:
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        return f"must be a regular expression: {e}"
    return problem


def _tokens(value: Any, vocab_size: int) -> str:
    # A prompt is long: its types and its bounds are found without a loop.
    good = isinstance(value, (list, tuple, set)) and all(
        issubclass(kind, Integral) and kind is not bool for kind in set(map(type, value))
    )
    if not good:
        return "must be a list of token ids"
    if value and not (0 <= min(value) and max(value) < vocab_size):
        wrong = next(token for token in value if not 0 <= token < vocab_size)
        return f"must be token ids from 0 to {vocab_size - 1}, got {wrong}"
    return ""


def _hashables(value: Any, vocab_size: int) -> str:
    # What is no token is taken out (`stop_tokens`). The engine takes what is empty, or 0, for none.
    try:
        set(value or ())
    except TypeError:
        return "must be a list of whole numbers"
    return ""


def _hashable(value: Any, vocab_size: int) -> str:
    # The detokenizer keeps those that have the same together.
    return "" if isinstance(value, Hashable) else "must be true or false"


def _biases(value: Any, vocab_size: int) -> str:
    if not isinstance(value, Mapping):
        return "must be an object of token ids and numbers"
    for token, bias in value.items():
        try:
            known = 0 <= int(token) < vocab_size
        except (TypeError, ValueError, OverflowError):
            known = False
        if not known:
            return f"must have keys from 0 to {vocab_size - 1}, got {token!r:.40}"
        # Minus infinity forbids a token.
        if bias != -math.inf and not (_is_finite(bias) and abs(bias) <= MAX_BIAS):
            return f"must have values from {-MAX_BIAS:g} to {MAX_BIAS:g}, got {bias!r:.40}"
    return ""


def _host(value: Any, vocab_size: int) -> str:
    if isinstance(value, str):
        if _HOST_NAME.fullmatch(value):
            return ""
        try:
            ipaddress.ip_address(value[1:-1] if value.startswith("[") and value.endswith("]") else value)
            return ""
        except ValueError:
            pass
    return "must be the name or the address of a host"


def _real(value: Any, vocab_size: int) -> str:
    return "" if isinstance(value, Real) else "must be a number"


def _anything(value: Any, vocab_size: int) -> str:
    return ""


# Of SamplingParams. Its parameters and no others are here; those that a processor of images or sound takes out of a
# request before are its own.
SAMPLING_CHECKS: dict[str, Check] = {
    "max_new_tokens": _integer,
    "stop": _texts,
    "stop_token_ids": _hashables,
    "stop_regex": _patterns,
    # By infinity, what a grammar forbids is divided into a NaN.
    "temperature": _number(0, MAX_FLOAT),
    "top_p": _number(0, 1, above=True),
    "top_k": _number(-1, INT32),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    # The engine allows 0, by which it then divides. By less than this, and a temperature, a logit may become infinite.
    "repetition_penalty": _number(1e-20, 2),
    "min_new_tokens": _number(0, INT32),
    # One that the engine can work with is left by now, and with rooms for samples `samples_asked` has been.
    "n": _anything,
    "json_schema": _schema,
    "regex": _text,
    "ebnf": _text,
    "structural_tag": _tag,
    "ignore_eos": _anything,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _hashable,
    "no_stop_trim": _anything,
    # For the request's own logit processor.
    "custom_params": _anything,
    # With `stream` only: see `_unused`.
    "stream_interval": _real,
    "logit_bias": _biases,
    # With --enable-deterministic-inference only.
    "sampling_seed": _whole(-INT64 - 1, INT64),
}
# For these the engine's default is not None, and it computes with what it is given.
_NOT_NONE = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "skip_special_tokens",
}

# Of one prompt's part of GenerateReqInput.
REQUEST_CHECKS: dict[str, Check] = {
    "rid": _name,
    "custom_logit_processor": _text,
    "lora_id": _text,
    "lora_path": _adapter,
    "sampling_params": _mapping,
    # Seconds since 1970.
    "received_time": _number(-MAX_TIME, MAX_TIME),
    # Of all in a batch of which one asks for logprobs.
    "top_logprobs_num": _whole(-INT32, INT32),
    "token_ids_logprob": _tokens,
}
# Of one that asks for logprobs.
LOGPROB_CHECKS: dict[str, Check] = {"logprob_start_len": _whole(-1, INT64)}
# Of one that goes to two workers; a server by itself has no use for these.
PAIR_CHECKS: dict[str, Check] = {
    "bootstrap_host": _host,
    "bootstrap_port": _whole(1, 65535),
    # It travels as 64 bits. 0 is for warm-ups (`check_request`).
    "bootstrap_room": _whole(0, INT64),
}
# Of one whose KV is kept under a key, or comes from elsewhere; an engine by itself has no use for these either.
KEY_CHECKS: dict[str, Check] = {"extra_key": _key, "priority": _whole(-INT64, INT64)}
# What FastAPI has checked against the type in GenerateReqInput (`check_types` where it has not), and what is harmless
# beyond that or checked elsewhere: labels by `check_labels`.
UNCHECKED = {
    "http_worker_ipc",
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "return_logprob",
    "return_text_in_logprobs",
    "stream",
    "log_metrics",
    "return_hidden_states",
    "return_routed_experts",
    "routed_experts_start_len",
    "modalities",
    "session_params",
    "bootstrap_pair_key",
    "decode_tp_size",
    "require_reasoning",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "background",
    "conversation_id",
    "routing_key",
    "no_logs",
    "custom_labels",
    "return_bytes",
    "return_entropy",
    "external_trace_header",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
}


def check_request(
    obj: GenerateReqInput,
    vocab_size: int,
    disaggregated: bool,
    *,
    keyed: bool = True,
    deterministic: bool = False,
) -> None:
    """Raise ValueError, naming the option, for a value of one prompt's request that the scheduler cannot work with.

    keyed: whether KV is kept under the request's key, by its priority. deterministic: whether its seed is used.
    Its prompt is for `check_prompt`, and options that nobody knows for `check_names`.
    """
    for table, used in (
        (REQUEST_CHECKS, True),
        (LOGPROB_CHECKS, obj.return_logprob),
        (PAIR_CHECKS, disaggregated),
        (KEY_CHECKS, keyed),
    ):
        for name, check in table.items() if used else ():
            _apply(name, check, getattr(obj, name), vocab_size)
    params = obj.sampling_params or {}
    unused = _unused(obj, params, deterministic)
    for name in [name for name in SAMPLING_CHECKS if name in params and name not in unused]:
        if params[name] is None and name in _NOT_NONE:
            raise ValueError(f"{name} must not be null.")
        _apply(name, SAMPLING_CHECKS[name], params[name], vocab_size)
    _check_biases(params, vocab_size)
    if (obj.top_logprobs_num or 0) > vocab_size:
        raise ValueError(f"top_logprobs_num must be at most {vocab_size}, got {obj.top_logprobs_num}.")
    if not disaggregated:
        return
    _check_unicode(obj, params)
    if obj.bootstrap_host != FAKE_BOOTSTRAP_HOST and (obj.rid or "").startswith(HEALTH_CHECK_RID_PREFIX):
        # A busy scheduler drops it without a word.
        raise ValueError(f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}, got {obj.rid!r:.80}.")
    if obj.bootstrap_room == 0 and obj.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST):
        # Decode reads it as metadata that is not there yet.
        raise ValueError("bootstrap_room must not be 0.")
    if obj.return_logprob and not 0 <= (obj.top_logprobs_num or 0) <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs_num must be from 0 to at most {MAX_TOP_LOGPROBS} with PD disaggregation, "
            f"got {obj.top_logprobs_num}."
        )
    if obj.session_params:
        raise ValueError("session_params cannot be used with PD disaggregation.")


def _check_unicode(obj: GenerateReqInput, params: Mapping) -> None:
    """Raise ValueError for a surrogate that stands alone, which JSON can bring and UTF-8 has not.

    The tokenizer would raise another error for it in a prompt, the answer in a rid, and all of /metrics in a label.
    """
    labels = obj.custom_labels
    given = {
        "rid": obj.rid,
        "text": obj.text,
        "stop": params.get("stop"),
        "bootstrap_host": obj.bootstrap_host,
        "custom_labels": [*labels.values()] if isinstance(labels, dict) else None,
    }
    for name, value in given.items():
        texts = value if isinstance(value, (list, tuple, set)) else [value]
        for text in [text for text in texts if isinstance(text, str)]:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name} must be Unicode text without lone surrogates, got {text!r:.80}.") from None


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


def check_labels(labels: Mapping[str, str] | None, known: Collection[str]) -> None:
    """Raise ValueError for labels of metrics that are not ``known``: with those, the first answer ends the worker."""
    unknown = sorted(set(labels or ()).difference(known))
    if unknown:
        raise ValueError(
            f"custom_labels has {', '.join(unknown)!r:.80}, which this worker's metrics do not have. Leave it out, or "
            "start all workers with --tokenizer-metrics-allowed-custom-labels and its name."
        )


def check_names(sampling_params: Mapping) -> None:
    """Raise ValueError for an option that the engine does not know, whose processor has taken out what is its own."""
    for name in sampling_params:
        if name not in SAMPLING_CHECKS:
            raise ValueError(f"sampling_params has no option {name!r:.80}.")


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


def _unused(obj: GenerateReqInput, params: Mapping, deterministic: bool) -> set[str]:
    """The options that the engine does not look at in this request."""
    unused = set() if deterministic else {"sampling_seed"}
    if not obj.stream or not params.get("stream_interval"):
        unused.add("stream_interval")
    if not _number(0, MAX_FLOAT)(params.get("temperature", 1.0), 0) and params.get("temperature", 1.0) < GREEDY:
        unused.add("top_k")
    return unused


def _check_biases(params: Mapping, vocab_size: int) -> None:
    """Raise ValueError where a temperature makes of biases what is no number, or leaves no token."""
    biases, temperature = params.get("logit_bias") or {}, params.get("temperature", 1.0)
    limit = MAX_BIAS * (min(1.0, temperature) if temperature >= GREEDY else 1.0)
    if any(bias > limit for bias in biases.values()):
        raise ValueError(f"logit_bias must have values to {limit:g} with a temperature of {temperature:g}.")
    if len(biases) >= vocab_size and max(biases.values()) < -limit:
        raise ValueError("logit_bias leaves no token.")


def check_prompt(token_ids: Any, vocab_size: int, max_input_len: int | None) -> None:
    """Raise ValueError for a prompt that the scheduler would not take. max_input_len: None for any length."""
    _apply("input_ids", _tokens, token_ids, vocab_size)
    if len(token_ids) == 0:
        # The engine looks at whole batches only; alone in a step, it ends the scheduler.
        raise ValueError("The prompt is empty: input_ids has no token.")
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


def _apply(name: str, check: Check, value: Any, vocab_size: int) -> None:
    problem = check(value, vocab_size) if value is not None else ""
    if problem:
        raise ValueError(f"{name} {problem}." if "got" in problem else f"{name} {problem}, got {value!r:.80}.")
