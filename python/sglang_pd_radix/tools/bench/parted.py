"""Answers that differ between runs: where they part, and how far apart the two tokens are there.

Correct answers part if batches round differently and two tokens tie. To check, the same prompt is sent again alone, up
to that place, for both tokens' log-probabilities. Wrong KV moves log-probabilities by far more, and picks a token that
is behind when sent alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import forced
from sglang_pd_radix.tools.rounding import LEAST_LIMIT

from .deploy import Deployment, Variant
from .measure import LoadGenerator, Run
from .workload import Workload

# Partings of a workload that are checked and reported one by one; in bfloat16 hundreds of answers part. In float32,
# where they are judged, more: with many requests as many part at ties.
MOST_LOOKED_AT = 20
MOST_JUDGED = 200
UNREADABLE = "which tokens it has cannot be read off its text"
LIKELIEST = 5


@dataclass(frozen=True)
class Parting:
    """Two answers to request ``number`` (from 1): the ``first`` run's, and that of all runs ``seen`` (variant,
    number)."""

    number: int
    prompt: Sequence[int]
    first: tuple[str, int]
    seen: tuple[tuple[str, int], ...]
    texts: tuple[str, str]


def find(runs: Sequence[Run]) -> list[Parting]:
    """Answers that differ from the first run's to the same request, once per request and text.

    Request i is the same in all runs; some runs may have fewer. Later turns of a chat have another prompt then, and are
    left out.
    """
    references: dict[int, Run] = {}
    found: dict[tuple[int, str], list[tuple[str, int]]] = {}
    for run in runs:
        for i, text in enumerate(run.texts):
            reference = references.setdefault(i, run)
            if reference.texts[i] != text and list(reference.prompts[i]) == list(run.prompts[i]):
                found.setdefault((i, text), []).append((run.variant, run.number))
    partings = []
    for (i, text), seen in sorted(found.items()):
        one = references[i]
        texts = (one.texts[i], text)
        partings.append(Parting(i + 1, one.prompts[i], (one.variant, one.number), tuple(seen), texts))
    return partings


def look(
    deployment: Deployment,
    load: LoadGenerator,
    workload: Workload,
    partings: Sequence[Parting],
    tell: Callable[[str], None],
    most: int = MOST_LOOKED_AT,
) -> list[dict[str, Any]]:
    """Check the first ``most`` partings, on their own and on the first run's side. Returns the report's entry of each.

    Raises PdRadixError if a request fails.
    """
    looks = [_noted(parting, most) for parting in partings]
    chosen = list(zip(partings, looks, strict=True))[:most]
    texts = [text for parting, _ in chosen for text in parting.texts]
    ids = load.encode(texts)
    by_name = {variant.name: variant for variant in deployment.variants}
    lengths = [request.answer for requests in workload.rounds for request in requests]
    for n, (parting, note) in enumerate(chosen):
        one, other = ids[2 * n], ids[2 * n + 1]
        if len(one) == len(other) == lengths[parting.number - 1]:
            place = len(os.path.commonprefix([one, other]))
            del note["why"]
            note |= {"token": place + 1, "tokens": [one[place], other[place]], "asked_again": {}}
        else:  # a tokenizer with several encodings of one text
            note["why"] = UNREADABLE
    for name, variant in by_name.items():  # side by side: each has to be resumed
        of_it = [n for n, (p, note) in enumerate(chosen) if "tokens" in note and name in (p.first[0], p.seen[0][0])]
        if of_it:
            deployment.use(variant)
        for n in of_it:
            parting, note = chosen[n]
            note["asked_again"][name] = _ask(deployment, variant, parting.prompt, ids[2 * n], note)
    for text in sentences(looks):
        tell(f"({workload.key}) {text}")
    return looks


def _noted(parting: Parting, most: int) -> dict[str, Any]:
    return {
        "request": parting.number,
        "prompt_tokens": len(parting.prompt),
        "first": list(parting.first),
        "seen": [list(run) for run in parting.seen],
        "why": f"only the first {most} are asked for again",
    }


def _ask(
    deployment: Deployment, variant: Variant, prompt: Sequence[int], ids: Sequence[int], note: dict[str, Any]
) -> dict[str, Any]:
    """Log-probabilities of both tokens at the parting, alone on ``variant``; null if not among the likeliest."""
    count, url = note["token"], deployment.url(variant)
    made = max(2, count)
    body = {
        "input_ids": list(prompt),
        # At least two: prefill makes the first, and decode needs one more.
        "sampling_params": {"temperature": 0, "max_new_tokens": made, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": LIKELIEST,
    }
    try:
        meta = forced.generate(url, body)
        tokens = [token for _, token, *_ in forced.places_of(url, meta, "output_token_logprobs", made)]
        tops = forced.places_of(url, meta, "output_top_logprobs", made)
    except PdRadixError as error:
        deployment.cluster.check()
        raise PdRadixError(f"request {note['request']}, asked again on {variant.name}: {error}") from None
    same = len(os.path.commonprefix([tokens[: count - 1], list(ids[: count - 1])]))
    if same < count - 1:
        return {"parts_earlier_at": same + 1}
    likeliest = {token: logprob for logprob, token, *_ in tops[count - 1]}
    return {"token": tokens[count - 1], "logprobs": [likeliest.get(token) for token in note["tokens"]]}


def apart(note: dict[str, Any]) -> float | None:
    """Distance of the two tokens, nats, on the side where it is greatest; None if unknown."""
    answers = list(note.get("asked_again", {}).values())
    pairs = [answer.get("logprobs", [None]) for answer in answers]
    if not pairs or any(logprob is None for pair in pairs for logprob in pair):
        return None
    return max(abs(one - other) for one, other in pairs)


def explained(note: dict[str, Any]) -> bool:
    """Whether float32 rounding explains it: alone, the two tokens tie on every side."""
    distance = apart(note)
    return distance is not None and distance <= LEAST_LIMIT


def sentences(looks: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per checked parting, and one for all others: in bfloat16 there are thousands."""
    rest = looks[MOST_LOOKED_AT:]
    if len(rest) < 2:
        return [told(note) for note in looks]
    requests = len({note["request"] for note in rest})
    # A request missing in the first run is compared with another run's.
    first = {"{} run {}".format(*note["first"]) for note in rest}
    than = f"those of {first.pop()}" if len(first) == 1 else "those first given"
    asked = sum("token" in note for note in rest)
    why = f"{asked} of them were asked for again" if asked else rest[0]["why"]
    more = f"{len(rest)} more answers, to {requests} requests, are others than {than}; {why}"
    return [*(told(note) for note in looks[:MOST_LOOKED_AT]), more]


def told(note: dict[str, Any]) -> str:
    """One sentence."""
    variant, number = note["first"]
    runs = ", ".join(f"{name} run {n}" for name, n in note["seen"])
    text = f"request {note['request']} ({note['prompt_tokens']} tokens): the answer of {runs}"
    if "token" not in note:
        return f"{text} is another than that of {variant} run {number}; {note['why']}"
    text += f" parts from that of {variant} run {number} at token {note['token']}"
    return f"{text}; asked again alone: " + "; ".join(
        f"{name}: {_of_side(answer)}" for name, answer in note.get("asked_again", {}).items()
    )


def _of_side(answer: dict[str, Any]) -> str:
    if "parts_earlier_at" in answer:
        return f"another answer from token {answer['parts_earlier_at']} on"
    one, other = answer["logprobs"]
    if one is None or other is None:
        return f"one of the two tokens is not among the {LIKELIEST} likeliest"
    return f"the two tokens have {one:.6f} and {other:.6f}, {abs(one - other):.1e} nats apart"


def unreadable(note: dict[str, Any]) -> bool:
    """Whether it was not checked because its text has several encodings."""
    return note.get("why") == UNREADABLE


def left_out(looks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Partings beyond the number that is checked."""
    return [note for note in looks if "token" not in note and not unreadable(note)]


def problems(looks: Sequence[dict[str, Any]]) -> list[str]:
    """Failures in float32: answers that rounding does not explain, as `sentences`.

    Unchecked ones do not count if rounding explains all checked ones: with enough requests as many part at ties.
    """
    wrong = [note for note in looks if not explained(note)]
    if len(wrong) == len(left_out(looks)):
        return []
    return [f"answers are not identical: {text}" for text in sentences(wrong)]
