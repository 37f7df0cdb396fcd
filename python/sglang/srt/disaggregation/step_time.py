"""How long a decode step takes, learned from the steps themselves.

A step's time is taken for a fixed part, a part for each request and a part for each token of KV that it reads. The
parts are what explains the medians of steps of a size, over many sizes: a pause or a step that was held up is one
sample of its size, and changes no median. Where the samples leave two explanations, the one that charges a further
request less is taken: it is put to the test by the next steps, where a bound that is too low would never be.

What clients see is a mean, and steps that wait for others on the same cores or GPU have a long tail: where a mean is
promised, the parts are multiplied by what makes them that of the last steps.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "Estimate",
    "OtherRanks",
    "Parts",
    "SeenTimes",
    "StepTimes",
    "StepWatch",
    "has_prompts",
]

# Picoseconds in a second: ranks agree on whole numbers, and compute with nothing else.
PS = 10**12
# Samples of a size that are kept, how many make it count, and how many sizes there are at most.
KEPT, ENOUGH, MOST_SIZES = 9, 3, 128
# Samples between two fits, and the steps after which a size counts half.
REFIT, HALF_LIFE = 16, 5000
# The last steps, which say by how much the present differs from what was learned; and by how much it may.
RECENT, MOST_DRIFT = 32, 2.0
# Where the mean is promised, it is that of as many steps as so many answers take, within bounds: who is admitted stays
# for an answer, and steps that wait for others do so by the dozen. And a step counts as at most so many times what is
# expected of it: a pause of a second is not what the next requests will see.
ANSWERS_SEEN, LEAST_SEEN, SEEN, MOST_SEEN = 4, 256, 1024, 12.0
# What keeps parts that nothing is known of small.
RIDGE = 1e-3


class Parts(NamedTuple):
    """A step's time in its parts, picoseconds."""

    fixed: int
    per_request: int
    per_token: int

    def of(self, requests: int, tokens: int) -> int:
        """Picoseconds of a step over so many requests that reads so many tokens of KV."""
        return self.fixed + self.per_request * requests + self.per_token * tokens


class Estimate(NamedTuple):
    """What is known of steps, in whole numbers: on several ranks the first one's, which all of them go by.

    decode: of a decode step. computed: of a step over remainders of prompts, by tokens instead of requests.
    milli_tokens: a request's tokens in a step, thousandths. answer: mean tokens of the last answers, 0 if none has
    ended. requests, tokens: the most that steps have had. delay: steps from an admission until the request decodes.
    waits: time between two tokens of a request over that of its step, thousandths: more where it waits for others'.
    """

    decode: Parts
    computed: Parts
    milli_tokens: int
    answer: int
    requests: int
    tokens: int
    delay: int = 0
    waits: int = 1000

    def figures(self) -> list[int]:
        """These as `WIDTH` numbers of 0 or more."""
        return [*self.decode, *self.computed, self.milli_tokens, *self[3:]]

    @classmethod
    def of(cls, figures: list[int]) -> Estimate | None:
        """What `figures` gave; None for zeros, which stand for no estimate."""
        if not figures[6]:
            return None
        return cls(Parts(*figures[:3]), Parts(*figures[3:6]), *figures[6:WIDTH])


WIDTH = 12


class _Size:
    """Steps of about one size: the last samples of requests, tokens and seconds."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, int, float]] = deque(maxlen=KEPT)
        self.last = 0

    def typical(self) -> tuple[float, float, float]:
        """Mean requests and tokens of the samples, and the median of their seconds."""
        requests, tokens, seconds = zip(*self.samples, strict=True)
        return sum(requests) / len(requests), sum(tokens) / len(tokens), median(seconds)


class StepTimes:
    """Samples of steps, and the parts that explain them."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=RECENT)
        self._count = self._fitted_at = 0
        self._fit: np.ndarray | None = None
        self._most = 0, 0

    def note(self, requests: int, tokens: int, seconds: float) -> None:
        """A step over ``requests`` that read ``tokens`` of KV took ``seconds``. Cost: the same for any number."""
        if requests <= 0 or not 0 < seconds < math.inf:
            return
        self._count += 1
        key = _level(requests), _level(tokens)
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= MOST_SIZES:
                del self._sizes[min(self._sizes, key=lambda k: self._sizes[k].last)]
            size = self._sizes[key] = _Size()
        size.samples.append((requests, tokens, seconds))
        size.last = self._count
        self._recent.append((requests, tokens, seconds))

    def seconds(self) -> float | None:
        """The median of the last steps; None if there were none."""
        return median(seconds for *_, seconds in self._recent) if self._recent else None

    def seconds_explained(self) -> float | None:
        """What the parts make of the same steps."""
        parts = self.parts()
        if parts is None:
            return None
        return median(parts.of(requests, tokens) for requests, tokens, _ in self._recent) / PS

    def most(self) -> tuple[int, int]:
        """The most requests and tokens of a step, where as many steps of its size have been seen as count."""
        self._update()
        return self._most

    def parts(self) -> Parts | None:
        """The parts of a step's time; None while too little is known."""
        self._update()
        if self._fit is None:
            return None
        fixed, per_request, per_token = (self._fit * self._drift(self._fit)).tolist()
        return Parts(round(PS * fixed), round(PS * per_request), round(PS * per_token))

    def _update(self) -> None:
        """Take in the samples that have come, if these are many or those before them few."""
        new = self._count - self._fitted_at
        if not (new >= REFIT or (new and (self._fit is None or self._count < 4 * REFIT))):
            return
        self._fitted_at = self._count
        sizes = self._counting()
        if sizes:
            samples = [sample for size in sizes for sample in size.samples]
            self._most = max(requests for requests, *_ in samples), max(tokens for _, tokens, _ in samples)
            self._fit = self._explain(sizes)

    def _counting(self) -> list[_Size]:
        return [size for size in self._sizes.values() if len(size.samples) >= ENOUGH]

    def _explain(self, sizes: list[_Size]) -> np.ndarray:
        """Seconds of the three parts, none below 0, by least squares of relative errors."""
        from scipy.optimize import nnls

        typical = np.array([size.typical() for size in sizes])
        ages = np.array([self._count - size.last for size in sizes])
        counts = np.array([len(size.samples) for size in sizes])
        weights = counts * 0.5 ** (ages / HALF_LIFE)
        columns = np.column_stack([np.ones(len(sizes)), typical[:, 0], typical[:, 1]]) / typical[:, 2:]
        scale = columns.max(axis=0)
        scale[scale == 0] = 1.0
        columns /= scale
        errors = np.zeros(len(sizes))
        for _ in range(3):
            # A size whose median is far off what the others say of it counts less.
            robust = weights / np.maximum(1.0, np.abs(errors) / max(0.02, 2 * float(np.median(np.abs(errors)))))
            root = np.sqrt(robust / robust.sum())
            ridge = np.diag([0.0, RIDGE, RIDGE])
            found, _ = nnls(np.vstack([columns * root[:, None], ridge]), np.concatenate([root, np.zeros(3)]))
            errors = columns @ found - 1
        return found / scale

    def _drift(self, fit: np.ndarray) -> float:
        """By what the last steps have taken longer than the parts say."""
        # As Python has them: with one number at a time numpy takes several times as long.
        fixed, per_request, per_token = fit.tolist()
        ratios = []
        for requests, tokens, seconds in self._recent:
            explained = fixed + per_request * requests + per_token * tokens
            ratios.append(seconds / explained if explained else MOST_DRIFT)
        return min(MOST_DRIFT, max(1 / MOST_DRIFT, median(ratios)))


class SeenTimes(StepTimes):
    """As `StepTimes`, but `parts` have the mean of the last steps and not what they usually take.

    Each step counts for as many requests as it had, as clients see it. What these waited for besides is kept apart.
    """

    def __init__(self) -> None:
        super().__init__()
        # Requests, tokens, seconds and seconds waited before of the last steps, each in the place of the oldest one.
        self._seen = np.zeros((SEEN, 4))
        self._span = LEAST_SEEN

    def expect(self, steps: int) -> None:
        """Answers take so many ``steps``."""
        self._span = min(SEEN, max(LEAST_SEEN, ANSWERS_SEEN * steps))

    def note(self, requests: int, tokens: int, seconds: float, waited: float = 0.0) -> None:
        """As in `StepTimes`. waited: seconds of other steps, for which the requests of this one had waited before."""
        before = self._count
        super().note(requests, tokens, seconds)
        if self._count > before:
            self._seen[before % SEEN] = requests, tokens, seconds, waited

    def waits(self) -> float:
        """Seconds between two tokens of a request for each second of its own steps: 1 or more, at most `MOST_DRIFT`."""
        self._update()
        if self._fit is None:
            return 1.0
        own, _, waited = self._means(self._last(self._span), self._fit)
        return min(MOST_DRIFT, 1 + waited / own) if own else MOST_DRIFT

    def seconds(self) -> float | None:
        """The mean of the last `RECENT` steps with what was waited for; None while too little is known."""
        self._update()
        if self._fit is None:
            return None
        own, _, waited = self._means(self._last(RECENT), self._fit)
        return own + waited

    def seconds_explained(self) -> float | None:
        """What the parts, and how long is waited besides, make of the same steps."""
        parts = self.parts()
        return None if parts is None else self._means(self._last(RECENT), np.array(parts) / PS)[1] * self.waits()

    def _drift(self, fit: np.ndarray) -> float:
        # The first steps of a worker may take seconds, and are no mean of others.
        later = self._count - RECENT
        if later < RECENT:
            return super()._drift(fit)
        own, explained, _ = self._means(self._last(min(self._span, later)), fit)
        return min(MOST_DRIFT, max(1 / MOST_DRIFT, own / explained)) if explained else MOST_DRIFT

    def _last(self, count: int) -> np.ndarray:
        """So many of the last steps, or all that there were."""
        count = min(count, self._count)
        return self._seen[np.arange(self._count - count, self._count) % SEEN]

    @staticmethod
    def _means(steps: np.ndarray, fit: np.ndarray) -> tuple[float, float, float]:
        """Mean seconds of ``steps`` for each of their requests: as they were, as ``fit`` has them, waited before."""
        requests, tokens, seconds, waited = steps.T
        explained = fit[0] + fit[1] * requests + fit[2] * tokens
        most, count = MOST_SEEN * explained, float(requests.sum())
        columns = np.minimum(seconds, most), explained, np.minimum(waited, most)
        own, made, waits = (float((requests * column).sum()) / count for column in columns)
        return own, made, waits


class StepWatch:
    """Takes the time of each step: that since the step before ended."""

    def __init__(self) -> None:
        # When the last step ended, if the loop has not been idle since.
        self._ended: float | None = None

    def idle(self) -> None:
        """The loop has nothing to do: the next step's time is not what passes until its end."""
        self._ended = None

    def lap(self, now: float | None = None) -> float | None:
        """A step has ended, ``now`` by the monotonic clock. Returns its seconds; None after an idle loop."""
        now = time.monotonic() if now is None else now
        began, self._ended = self._ended, now
        return None if began is None else now - began


def has_prompts(batch: Any) -> bool:
    """Whether a step computes prompts, on this or another of the DP ranks that step together."""
    return bool(getattr(batch, "is_extend_in_batch", False))


class OtherRanks:
    """The DP ranks that step together with this one, by what the engine tells all of each step.

    decoding: requests of the rank that decodes the most of them, this one included, as far as is known; 0 where ranks
    do not step together, and where the engine tells none of the others (DeepEP with --moe-dense-tp-size 1).
    """

    def __init__(self) -> None:
        self.decoding = 0
        # Whether there are any.
        self.together = False

    def idle(self) -> None:
        """The loop has nothing to do, on any of them."""
        self.decoding = 0

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` has been processed. A rank that computes prompts counts these, and not requests."""
        everywhere = batch.global_num_tokens or ()
        self.together = len(everywhere) > 1
        if everywhere and not has_prompts(batch):
            self.decoding = max(everywhere)


def _level(number: int) -> int:
    """Numbers within a factor of about 1.4 have one level."""
    return round(2 * math.log2(number)) if number > 0 else -1


def mean_of(numbers: Iterable[int]) -> int:
    """The mean, rounded up; 0 of none."""
    listed = list(numbers)
    return -(-sum(listed) // len(listed)) if listed else 0
