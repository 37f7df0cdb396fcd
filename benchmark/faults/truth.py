"""The right answers: those of one ordinary engine without disaggregation, without any cache, asked beforehand.

In float32 an answer is right if it is this one, token for token. Two tokens that are as likely to within ``TIE`` are
both right, since another batch adds in another order: there the engine is asked which the second was, and then how the
answer goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Cluster, local_session
from sglang_pd_radix.tools.rounding import LEAST_LIMIT as TIE

from . import deploy
from .traffic import Ask, Told

# So many other answers to a request are asked for: with each place of two such tokens there are twice as many.
WAYS = 32


@dataclass
class Truth:
    """``answers``: the ids of each request's answer; ``also``: others that are as likely, of those that have any.

    ``loose``: beginnings of more of these, of which it was not asked how they go on; see ``WAYS``.
    """

    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    also: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    loose: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def add(self, other: Truth, after: int) -> None:
        """Those of ``other`` too, whose requests come ``after`` so many."""
        self.answers |= {after + place: ids for place, ids in other.answers.items()}
        self.also |= {after + place: ways for place, ways in other.also.items()}
        self.loose |= {after + place: begins for place, begins in other.loose.items()}

    def parts_at(self, one: Told) -> int | None:
        """The first token of a whole answer that is not the right one; None if all are."""
        right = self.answers.get(one.ask, ())
        pairs = zip(one.ids or (), right, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and one.ids != right:
            return min(len(right), len(one.ids or ()))
        return at

    def tied(self, one: Told) -> bool:
        """Whether a whole answer parts where two tokens are as likely, and is what the engine says with the other."""
        return one.ids in self.also.get(one.ask, ())

    def unknown(self, one: Told) -> bool:
        """Whether a whole answer begins in a way that is as likely, and of which it was not asked how it goes on."""
        ids = one.ids or ()
        return not self.tied(one) and any(ids[: len(begin)] == begin for begin in self.loose.get(one.ask, ()))


def problems(told: Sequence[Told], truth: Truth) -> list[str]:
    """Whole answers that are wrong."""
    return [
        f"client {one.number}: the answer to request {one.ask} differs from token {truth.parts_at(one)} on from that "
        f"of one engine alone"
        for one in told
        if one.ended_how == "whole" and truth.parts_at(one) is not None and not (truth.tied(one) or truth.unknown(one))
    ]


def not_judged(told: Sequence[Told], truth: Truth) -> list[str]:
    """Whole answers of which nothing is known from where they part on."""
    count = sum(one.ended_how == "whole" and truth.unknown(one) for one in told)
    return [f"{count} answers from where two tokens are as likely on: more than {WAYS} go on from there"] * bool(count)


def tied(told: Sequence[Told], truth: Truth) -> int:
    """Whole answers that part where two tokens are as likely."""
    return sum(one.ended_how == "whole" and truth.tied(one) for one in told)


def of_engine_alone(
    model: str, asks: Sequence[Ask], clients: int, log_dir: Path, options: Sequence[str], on_progress: Any = None
) -> Truth:
    """Starts one, asks it and ends it. Raises PdRadixError."""
    return asked_alone(model, lambda engine: ask(engine, asks, clients), log_dir, options, on_progress)


def asked_alone(
    model: str, asking: Callable[[Cluster], Truth], log_dir: Path, options: Sequence[str], on_progress: Any = None
) -> Truth:
    """What comes of ``asking`` such an engine. Raises PdRadixError."""
    print("an engine alone is asked for the right answers", flush=True)
    with deploy.engine_alone(model, log_dir, options=options, on_progress=on_progress) as engine:
        found = asking(engine)
    tied = f"; in {len(found.also)} of them two tokens are as likely somewhere" if found.also else ""
    print(f"it has answered {len(found.answers)} requests{tied}", flush=True)
    return found


def ask(engine: Cluster, asks: Sequence[Ask], clients: int) -> Truth:
    """What the running ``engine`` answers to each request, ``clients`` at a time. Raises PdRadixError."""
    truth = Truth()

    def ways(place: int) -> tuple[int, ...]:
        return _ways(engine.router_url, place, asks[place], truth)

    with ThreadPoolExecutor(clients) as pool:
        for place, answer in enumerate(pool.map(ways, range(len(asks)))):
            truth.answers[place] = answer
    return truth


def _ways(url: str, place: int, one: Ask, truth: Truth) -> tuple[int, ...]:
    """The answer to request ``place``; the others that are as likely go into ``truth``. Raises PdRadixError."""
    answer, begins = _way(url, place, one, ())
    also: set[tuple[int, ...]] = set()
    while begins and len(also) < WAYS:
        way, more = _way(url, place, one, begins.pop(0))
        also.add(way)
        begins += more
    if also:
        truth.also[place] = also
    if begins:
        truth.loose[place] = tuple(begins)
    return answer


def _way(url: str, place: int, one: Ask, begin: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """All of the answer that begins with ``begin``, and how others begin that are as likely. Raises PdRadixError."""
    if len(begin) == one.answer:
        return begin, []
    answer = _answer(url, Ask((*one.ids, *begin), one.answer - len(begin)))
    ids = (*begin, *answer["output_ids"])
    if len(ids) != one.answer:
        raise PdRadixError(f"the engine alone gave {len(ids)} of {one.answer} tokens to request {place}")
    found = []
    for at, likeliest in enumerate(answer["meta_info"].get("output_top_logprobs") or (), len(begin)):
        other = _as_likely(likeliest, ids[at])
        if other is not None:
            found.append((*ids[:at], other))
    return ids, found


def _answer(url: str, one: Ask) -> Mapping[str, Any]:
    body = {
        "input_ids": list(one.ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": one.answer, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    try:
        with local_session() as session:
            reply = session.post(url + "/generate", json=body, timeout=300)
        if reply.status_code == 200:
            found = reply.json()
            assert isinstance(found["output_ids"], list) and isinstance(found["meta_info"], dict)
            return found
        said = reply.text[:300]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        said = f"{type(error).__name__}: {error}"
    raise PdRadixError(f"the engine alone, which is asked for the right answers, does not give one: {said}")


def _as_likely(likeliest: Any, taken: int) -> int | None:
    """The other id of the two ``likeliest`` (log-probability, id, text) if it is as likely as the one ``taken``."""
    if not likeliest or len(likeliest) < 2:
        return None
    (first, a, *_), (second, b, *_) = likeliest[:2]
    if first is None or second is None or abs(first - second) > TIE:
        return None
    return int(b if taken == a else a)
