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
