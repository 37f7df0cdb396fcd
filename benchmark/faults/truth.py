"""The right answers: those of one ordinary engine without disaggregation, without any cache, asked beforehand.

In float32 an answer is right if it is this one, token for token. Two tokens that are as likely to within ``TIE`` are
both right, since another batch adds in another order: there the engine is asked which the second was.
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


@dataclass
class Truth:
    """``answers``: the ids of each request's answer; ``ties``: for (request, place) the other id that is as likely."""

    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ties: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, other: Truth, after: int) -> None:
        """Those of ``other`` too, whose requests come ``after`` so many."""
        self.answers |= {after + place: ids for place, ids in other.answers.items()}
        self.ties |= {(after + place, at): token for (place, at), token in other.ties.items()}

    def parts_at(self, one: Told) -> int | None:
        """The first token of a whole answer that is not the right one; None if all are."""
        right = self.answers.get(one.ask, ())
        pairs = zip(one.ids or (), right, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and one.ids != right:
            return min(len(right), len(one.ids or ()))
        return at

    def tied(self, one: Told) -> bool:
        """Whether a whole answer parts where two tokens are as likely, and goes on with the other."""
        at = self.parts_at(one)
        return at is not None and one.ids is not None and self.ties.get((one.ask, at)) in one.ids[at : at + 1]


def problems(told: Sequence[Told], truth: Truth) -> list[str]:
    """Whole answers that are wrong."""
    return [
        f"client {one.number}: the answer to request {one.ask} differs from token {truth.parts_at(one)} on from that "
        f"of one engine alone"
        for one in told
        if one.ended_how == "whole" and truth.parts_at(one) is not None and not truth.tied(one)
    ]


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
    ties = len({request for request, _ in found.ties})
    tied = f"; in {ties} of them two tokens are as likely somewhere" if ties else ""
    print(f"it has answered {len(found.answers)} requests{tied}", flush=True)
    return found


def ask(engine: Cluster, asks: Sequence[Ask], clients: int) -> Truth:
    """What the running ``engine`` answers to each request, ``clients`` at a time. Raises PdRadixError."""
    truth = Truth()
    with ThreadPoolExecutor(clients) as pool:
        for place, answer in enumerate(pool.map(lambda one: _answer(engine.router_url, one), asks)):
            ids = truth.answers[place] = tuple(answer["output_ids"])
            if len(ids) != asks[place].answer:
                raise PdRadixError(
                    f"the engine alone gave {len(ids)} of {asks[place].answer} tokens to request {place}"
                )
            for at, likeliest in enumerate(answer["meta_info"].get("output_top_logprobs") or ()):
                other = _as_likely(likeliest, ids[at])
                if other is not None:
                    truth.ties[place, at] = other
    return truth


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
