"""Whether two answers to one prompt differ by more than rounding.

The same prompt in another batch goes through kernels of another shape, whose sums round differently: in bf16 two
correct runs part where two tokens are almost as likely. What KV that is wrong does is of another size: it moves the
log-probabilities of all tokens after it. So every token of an answer is scored by another computation over the same
tokens, and what the two differ by is held against what they do in runs without any cache on decode on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Of a maximum over some thousand tokens, the next thousand will exceed a little; and float32 rounds too.
MARGIN = 3.0
LEAST_LIMIT = 1e-4
# Where rounding is too large to be told from a fault, what is this many times as large is none.
BEYOND_NOISE = 1.5


def limit_of(judged: float, noise: float) -> float:
    """What a figure is held to: ``judged``, which passes it, or more where the ``noise`` is above that itself.

    Above ``judged`` nothing is passed, and what is no larger than the noise is no failure either.
    """
    return judged if noise <= judged else BEYOND_NOISE * noise


@dataclass(frozen=True)
class Answer:
    """Tokens (ids, or texts), the log-probability of each (nats), and the likeliest of each place with theirs."""

    tokens: tuple[Any, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[dict[Any, float], ...] = ()


def _distance(a: float | None, b: float | None) -> float:
    """Infinite where one is no number (in JSON: null), which no rounding makes."""
    return math.inf if a is None or b is None or math.isnan(a) or math.isnan(b) else abs(a - b)


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
# square of an answer's. By what was measured, see docs/evidence.md#verdicts-2026-11-23.
CEILINGS = {"float32": (0.01, 0.003), "": (0.5, 0.2)}


@dataclass(frozen=True)
class Limits:
    """What rounding may explain of a `Deviation`: what is up to ``most`` and ``rms`` is right.

    noise: the largest of each kind between runs that are right.
    """

    most: float
    rms: float
    noise: Deviation

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
        )

    @property
    def held_to(self) -> Deviation:
        """What is above it is more than rounding; see `limit_of`. Two tokens may each be off by the limit."""
        return Deviation(
            limit_of(self.most, self.noise.most),
            limit_of(self.rms, self.noise.rms),
            max(limit_of(2 * self.most, self.noise.behind), 2 * limit_of(self.most, self.noise.most)),
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
        """What of ``d`` is more than rounding, None where nothing is."""
        limit, wrong = self.held_to, []
        if not d.most <= limit.most:
            wrong.append(f"log-probabilities are off by up to {d.most:.2g} (limit {limit.most:.2g})")
        if not d.rms <= limit.rms:
            wrong.append(f"by {d.rms:.2g} in the root mean square (limit {limit.rms:.2g})")
        if not d.behind <= limit.behind:
            wrong.append(f"a token is {d.behind:.2g} behind the likeliest (limit {limit.behind:.2g})")
        return ", ".join(wrong) or None
