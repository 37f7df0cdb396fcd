"""Decides whether two answers to one prompt differ by more than rounding.

In another batch a prompt goes through kernels of other shapes, which round differently: in bf16 two correct runs part
where two tokens nearly tie. Wrong KV has a larger effect: it moves the log-probabilities of all later tokens. So every
token of an answer is scored by another computation over the same tokens. The difference is compared with that of runs
without a cache on decode on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# A maximum over some thousand tokens is exceeded a little by the next thousand; and float32 rounds too.
MARGIN = 3.0
LEAST_LIMIT = 1e-4
# If rounding is too large to detect faults, only differences above this multiple of it are failures.
BEYOND_NOISE = 1.5


def limit_of(judged: float, noise: float) -> float:
    """The limit of a figure: ``judged``, or a multiple of ``noise`` if that is above it.

    Beyond ``judged`` nothing passes, and differences up to the noise do not fail either.
    """
    return judged if noise <= judged else BEYOND_NOISE * noise


@dataclass(frozen=True)
class Answer:
    """Tokens (ids or texts), their log-probabilities (nats), and each place's likeliest tokens with theirs."""

    tokens: tuple[Any, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[dict[Any, float], ...] = ()


def _distance(a: float | None, b: float | None) -> float:
    """Infinite if one is NaN (null in JSON), which rounding never makes."""
    return math.inf if a is None or b is None or math.isnan(a) or math.isnan(b) else abs(a - b)


@dataclass(frozen=True)
class Deviation:
    """Difference between an answer and another computation's score of it; nats, infinite for NaN.

    most: largest difference of a token's log-probability. rms: root mean square. behind: most by which a token was
    behind the likeliest one, by the score.
    """

    most: float
    rms: float
    behind: float


def deviation(answer: Answer, score: Answer) -> Deviation:
    """The deviation of a greedy ``answer`` from the ``score`` of its tokens."""
    if answer.tokens != score.tokens:
        raise ValueError("a score is of the tokens of the answer")
    apart = [_distance(a, b) for a, b in zip(answer.logprobs, score.logprobs, strict=True)]
    behind = [
        _distance(max((value for value in place.values() if value is not None), default=math.nan), own)
        for place, own in zip(score.likeliest, score.logprobs, strict=True)
    ]
    return Deviation(max(apart), math.sqrt(sum(a * a for a in apart) / len(apart)), max(behind))


# Upper bounds of the limits, nats: of a log-probability, and of an answer's root mean square. Measured, see
# docs/evidence.md#verdicts-2026-11-23.
CEILINGS = {"float32": (0.01, 0.003), "": (0.5, 0.2)}


@dataclass(frozen=True)
class Limits:
    """The deviation that rounding may explain: up to ``most`` and ``rms``.

    noise: the largest deviations between correct runs.
    """

    most: float
    rms: float
    noise: Deviation

    @classmethod
    def of(cls, noise: Iterable[Deviation], dtype: str) -> Limits:
        """From deviations of answers without a cache, in ``dtype``."""
        seen = list(noise)
        largest = Deviation(*(max(getattr(d, name) for d in seen) for name in ("most", "rms", "behind")))
        most, rms = CEILINGS.get(dtype.removeprefix("torch."), CEILINGS[""])
        return cls(
            min(most, max(LEAST_LIMIT, MARGIN * largest.most)),
            min(rms, max(LEAST_LIMIT, MARGIN * largest.rms)),
            largest,
        )

    @property
    def held_to(self) -> Deviation:
        """The limits; see `limit_of`. ``behind`` is twice ``most``: both tokens may be off."""
        return Deviation(
            limit_of(self.most, self.noise.most),
            limit_of(self.rms, self.noise.rms),
            max(limit_of(2 * self.most, self.noise.behind), 2 * limit_of(self.most, self.noise.most)),
        )

    @property
    def unjudgeable(self) -> str | None:
        """Why no judgement is possible: correct runs differ too much. None if it is possible."""
        if max(self.noise.most, self.noise.behind / 2) <= self.most and self.noise.rms <= self.rms:
            return None
        seen = self.noise
        return (
            f"answers without any cache on decode differ by up to {seen.most:.2g} nats (rms {seen.rms:.2g}, "
            f"{seen.behind:.2g} behind the likeliest) from a pass of prefill over the same tokens. A fault can be told "
            f"from rounding where these are at most {self.most:.2g} (rms {self.rms:.2g}, {2 * self.most:.2g} behind)"
        )

    def beyond(self, d: Deviation) -> str | None:
        """What in ``d`` exceeds rounding; None if nothing does."""
        limit, wrong = self.held_to, []
        if not d.most <= limit.most:
            wrong.append(f"log-probabilities are off by up to {d.most:.2g} (limit {limit.most:.2g})")
        if not d.rms <= limit.rms:
            wrong.append(f"by {d.rms:.2g} in the root mean square (limit {limit.rms:.2g})")
        if not d.behind <= limit.behind:
            wrong.append(f"a token is {d.behind:.2g} behind the likeliest (limit {limit.behind:.2g})")
        return ", ".join(wrong) or None
