"""Whether two answers to one prompt differ by more than rounding.

The same prompt in another batch goes through kernels of another shape, whose sums round differently: in bf16 two
correct runs part where two tokens are almost as likely. What KV that is wrong does is of another size: it moves the
log-probabilities of all tokens after it. So the log-probabilities of the tokens that both answers have in common are
compared, and where they part, how far the one token was behind the other; both against what two runs without any cache
on decode differ by on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Of a maximum over some thousand tokens, the next thousand will exceed a little; and float32 rounds too.
MARGIN = 3.0
LEAST_LIMIT = 1e-4


@dataclass(frozen=True)
class Answer:
    """Tokens (ids, or texts), the log-probability of each (nats), and the likeliest of each place with theirs."""

    tokens: tuple[Any, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[dict[Any, float], ...] = ()


@dataclass(frozen=True)
class Difference:
    """Two answers to one prompt. drift: the largest difference of a log-probability before they part, nats.

    parted_at: the first token that is not the same, None if all are. behind: how much less likely, by ``one``, the
    other's token was there, nats; infinite if it was not among the likeliest, None if they do not part.
    """

    drift: float
    parted_at: int | None = None
    behind: float | None = None

    def within(self, limit: float) -> bool:
        """Whether rounding of at most ``limit`` explains it."""
        return self.drift <= limit and (self.behind is None or self.behind <= limit)


def difference(one: Answer, other: Answer) -> Difference:
    """How ``other`` differs from ``one``, which knows the likeliest tokens."""
    drift = 0.0
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            likeliest = one.likeliest[place] if place < len(one.likeliest) else {}
            return Difference(drift, place, _distance(one.logprobs[place], likeliest.get(b, -math.inf)))
        drift = max(drift, _distance(one.logprobs[place], other.logprobs[place]))
    if len(one.tokens) != len(other.tokens):
        return Difference(drift, min(len(one.tokens), len(other.tokens)), math.inf)
    return Difference(drift)


def _distance(a: float | None, b: float | None) -> float:
    """Infinite where one is no number (in JSON: null), which no rounding makes."""
    return math.inf if a is None or b is None or math.isnan(a) or math.isnan(b) else abs(a - b)


def limit_of(noise: Iterable[Difference]) -> float:
    """What rounding may explain, nats, from the differences of runs that were to be the same."""
    seen = [value for d in noise for value in (d.drift, d.behind) if value is not None and math.isfinite(value)]
    return max(LEAST_LIMIT, MARGIN * max(seen, default=0.0))


# ------------------------------------------------------------------------------------------- answers that were scored


@dataclass(frozen=True)
class Deviation:
    """An answer and a score of the same tokens by another computation; all in nats, infinite where one is no number.

    most: the largest difference of a token's log-probability. rms: the root of the mean square of all. behind: the most
    that a token was less likely than the likeliest of its place, by the score.
    """

    most: float
    rms: float
    behind: float


def deviation(answer: Answer, score: Answer) -> Deviation:
    """How far ``answer``, which was made greedily, is from the ``score`` of its tokens, with the likeliest of each."""
    if answer.tokens != score.tokens:
        raise ValueError("a score is of the tokens of the answer")
    apart = [_distance(a, b) for a, b in zip(answer.logprobs, score.logprobs, strict=True)]
    behind = [
        _distance(max((value for value in place.values() if value is not None), default=math.nan), own)
        for place, own in zip(score.likeliest, score.logprobs, strict=True)
    ]
    return Deviation(max(apart), math.sqrt(sum(a * a for a in apart) / len(apart)), max(behind))


# No noise lifts a limit above these, nats: the largest that rounding may do to a log-probability, and to the root mean
# square of an answer's. By what was measured, see docs/operations.md.
CEILINGS = {"float32": (0.01, 0.003), "": (0.5, 0.2)}


@dataclass(frozen=True)
class Limits:
    """What rounding may explain of a `Deviation`. noise: the largest of each kind between runs that are right."""

    most: float
    rms: float
    noise: Deviation
    ceiling: float

    @classmethod
    def of(cls, noise: Iterable[Deviation], dtype: str) -> Limits:
        """From the deviations of answers in which no cache had a part, in ``dtype``."""
        seen = list(noise)
        largest = Deviation(*(max(getattr(d, name) for d in seen) for name in ("most", "rms", "behind")))
        most, rms = CEILINGS.get(dtype.removeprefix("torch."), CEILINGS[""])
        return cls(
            min(most, max(LEAST_LIMIT, MARGIN * largest.most)),
            min(rms, max(LEAST_LIMIT, MARGIN * largest.rms)),
            largest,
            most,
        )

    @property
    def unjudgeable(self) -> str | None:
        """Why nothing can be said here, None where something can: runs that are right differ by more than may be."""
        if max(self.noise.most, self.noise.behind / 2) <= self.most and self.noise.rms <= self.rms:
            return None
        seen = self.noise
        return (
            f"answers without any cache on decode differ by up to {seen.most:.2g} nats (rms {seen.rms:.2g}, "
            f"{seen.behind:.2g} behind the likeliest) from a pass of prefill over the same tokens. A fault can be told "
            f"from rounding where these are at most {self.most:.2g} (rms {self.rms:.2g}, {2 * self.most:.2g} behind)"
        )

    def beyond(self, d: Deviation) -> str | None:
        """What of ``d`` is more than rounding, None where nothing is. Two tokens may each be off by the limit."""
        wrong = []
        if not d.most <= self.most:
            wrong.append(f"log-probabilities are off by up to {d.most:.2g} (limit {self.most:.2g})")
        if not d.rms <= self.rms:
            wrong.append(f"by {d.rms:.2g} in the root mean square (limit {self.rms:.2g})")
        if not d.behind <= 2 * self.most:
            wrong.append(f"a token is {d.behind:.2g} behind the likeliest (limit {2 * self.most:.2g})")
        return ", ".join(wrong) or None
