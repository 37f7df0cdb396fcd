"""Log-probabilities of a given answer: one pass of prefill over prompt and answer.

Two free-running answers are comparable only up to where they part. A given answer has a log-probability for every
token, whatever the worker would have generated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .cluster import http
from .rounding import Answer

# Decode address of requests without a decode worker, as in a worker's own warm-up.
NOBODY = "2.2.2.2"


def generate(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The ``meta_info`` of the answer to ``body``.

    Raises PdRadixError without an answer, or if the request is aborted.
    """
    status, content = http(url + "/generate", body, timeout=600)
    said = content.decode(errors="replace")[:300]
    if status != 200:
        raise PdRadixError(f"{url}/generate answered HTTP {status}: {said}")
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):  # from a router, or a proxy before it
        raise PdRadixError(f"{url}/generate answered HTTP 200 with what is no answer of an engine: {said}")
    end = meta.get("finish_reason")
    if isinstance(end, dict) and end.get("type") == "abort":
        raise PdRadixError(f"{url}/generate was aborted: {end.get('message')}")
    return meta


def places_of(url: str, meta: dict[str, Any], name: str, count: int) -> list[Any]:
    """The entries under ``name`` in ``meta`` (of `generate`) for the ``count`` requested tokens.

    Raises PdRadixError on another number.
    """
    places = meta.get(name) or []
    if not places:
        raise PdRadixError(f"{url}/generate returned no log-probabilities ({name}): see the logs of router and workers")
    if len(places) != count:
        raise PdRadixError(f"{url}/generate answered with {len(places)} tokens, and {count} were asked for")
    return places


def score(url: str, prompt: Sequence[int], answer: Sequence[int], top: int = 0, prefill_alone: bool = False) -> Answer:
    """Log-probabilities of each token of ``answer`` after ``prompt`` and the answer before it.

    url: of a router or an aggregated engine. Prefill computes all in one pass; decode only receives the KV, which has
    no influence. prefill_alone: url is a prefill worker's, which then sends no KV. top: number of likeliest tokens to
    return per place; a router does not pass them on, a prefill worker does. Raises PdRadixError without an answer, or
    for one with other tokens.
    """
    if not prompt or not answer:
        raise PdRadixError("an answer can be scored only after a prompt: neither may be empty")
    body = {
        "input_ids": [*prompt, *answer],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        **({"top_logprobs_num": top} if top else {}),
        **({"bootstrap_host": NOBODY, "bootstrap_room": random.randrange(1, 2**62)} if prefill_alone else {}),
    }
    meta = generate(url, body)
    # The first is the prompt's last token, which has no log-probability here.
    told = (meta.get("input_token_logprobs") or [])[1:]
    tokens = tuple(token for _, token, *_ in told)
    if tokens != tuple(answer):
        raise PdRadixError(
            f"{url}/generate scored {len(tokens)} tokens, which are not the {len(answer)} it was given: a router that "
            "does not pass on prefill's log-probabilities of the prompt cannot be used"
        )
    places = likeliest(meta.get("input_top_logprobs"), 1) if top else ()
    if top and len(places) != len(tokens):
        raise PdRadixError(f"{url}/generate returned no likeliest tokens: ask a prefill worker directly")
    return Answer(tokens, tuple(logprob for logprob, *_ in told), places)


def likeliest(places: Sequence[Sequence[Sequence[Any]] | None] | None, skip: int = 0) -> tuple[dict[Any, float], ...]:
    """The likeliest tokens of each place with log-probabilities, from an engine's ``*_top_logprobs`` after ``skip``."""
    return tuple({token: logprob for logprob, token, *_ in place or ()} for place in (places or [])[skip:])
