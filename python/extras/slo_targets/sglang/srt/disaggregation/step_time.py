"""How long a decode step takes, learned from the steps themselves.

A step's time is a fixed part, a part for each request and a part for each token of KV that it reads: what explains the
medians of steps of a size, over many sizes. A pause is one sample of its size and changes no median. Where the samples
leave two explanations, the one that charges a further request less is taken: the next steps put it to the test, where a
bound that is too low would never be.

What clients see is a mean, and steps that wait for others on the same cores or GPU have a long tail. So the parts are
multiplied by what makes them the mean of the last steps.

Upstream: none is known.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import numpy as np

__all__ = ["Estimate", "Parts", "StepTimes"]

# Picoseconds in a second: ranks agree on whole numbers, and compute with nothing else.
PS = 10**12
# Samples of a size that are kept, how many make it count, and how many sizes there are at most.
KEPT, ENOUGH, MOST_SIZES = 9, 3, 128
# Steps between two fits, but for the first ones.
REFIT = 16
# The steps that the metrics are of; by how much the mean may differ from what the parts say.
RECENT, MOST_DRIFT = 32, 2.0
# The mean is that of as many steps as so many answers take, within bounds: who is admitted stays for an answer, and
# steps that wait for others do so by the dozen. A step counts as at most so many times what is expected of it: a pause
# of a second is not what the next requests will see.
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
    """What is known of decode steps, in whole numbers: on several ranks the first one's, which all of them go by.

    milli_tokens: a request's tokens in a step, thousandths. answer: mean tokens of the last answers, 0 if none has
    ended. requests, tokens: the most that steps have had. delay: steps from an admission until the request decodes.
    waits: time between two tokens of a request over that of its step, thousandths: more where it waits for others'.
    """

    decode: Parts
    milli_tokens: int
    answer: int
    requests: int
    tokens: int
    delay: int = 0
    waits: int = 1000

    def figures(self) -> list[int]:
        """These as `WIDTH` numbers of 0 or more."""
        return [*self.decode, *self[1:]]

    @classmethod
    def of(cls, figures: list[int]) -> Estimate | None:
        """What `figures` gave; None for zeros, which stand for no estimate."""
        return cls(Parts(*figures[:3]), *figures[3:WIDTH]) if figures[3] else None


WIDTH = 9


class StepTimes:
    """Samples of steps, the parts that explain them, and their mean."""

    def __init__(self) -> None:
        # The last samples of each size, as requests, tokens and seconds; the size that came last is the last.
        self._sizes: OrderedDict[tuple[int, int], deque[tuple[int, int, float]]] = OrderedDict()
        self._count = 0
        self._fit: np.ndarray | None = None
        self._most = 0, 0
        # Of the mean and of the last steps: sums in which older steps count less, and each for all of its requests. Of
        # ones, requests, tokens, seconds, and seconds that the requests had waited before.
        self._seen = np.zeros((2, 5))
        self._forget = np.array([[2 / LEAST_SEEN], [2 / RECENT]])

    def expect(self, steps: int) -> None:
        """Answers take so many ``steps``."""
        self._forget[0] = 2 / min(SEEN, max(LEAST_SEEN, ANSWERS_SEEN * steps))

    def note(self, requests: int, tokens: int, seconds: float, waited: float = 0.0) -> None:
        """A step over ``requests`` that read ``tokens`` of KV took ``seconds``. Cost: the same for any number.

        waited: seconds of other steps, for which its requests had waited before.
        """
        if requests <= 0 or not 0 < seconds < math.inf:
            return
        self._count += 1
        key = _level(requests), _level(tokens)
        self._sizes.setdefault(key, deque(maxlen=KEPT)).append((requests, tokens, seconds))
        self._sizes.move_to_end(key)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)
        if self._count % REFIT == 0 or self._count < 4 * REFIT:
            self._explain()
        if self._fit is None:
            return
        if self._count == RECENT:
            # The first steps of a worker may take seconds, and are no mean of others.
            self._seen[:] = 0
        most = MOST_SEEN * float(self._fit @ (1, requests, tokens))
        seen = np.array([1, requests, tokens, min(seconds, most), min(waited, most)])
        self._seen += requests * seen - self._forget * self._seen

    def parts(self) -> Parts | None:
        """The parts of a step's time, whose mean is that of the last steps; None while too little is known."""
        if self._fit is None:
            return None
        fixed, per_request, per_token = (PS * self._drift() * self._fit).tolist()
        return Parts(round(fixed), round(per_request), round(per_token))

    def most(self) -> tuple[int, int]:
        """The most requests and tokens of a step, where as many steps of its size have been seen as count."""
        return self._most

    def waits(self) -> float:
        """Seconds between two tokens of a request for each second of its own steps: 1 or more, at most `MOST_DRIFT`."""
        own, waited = self._seen[0, 3:].tolist()
        return min(MOST_DRIFT, 1 + waited / own) if own else 1.0

    def seconds(self) -> float | None:
        """The mean of the last steps with what was waited for; None while too little is known."""
        count, *_, own, waited = self._seen[1].tolist()
        return (own + waited) / count if count else None

    def seconds_explained(self) -> float | None:
        """What the parts, and how long is waited besides, make of the same steps."""
        seen = self._seen[1]
        return None if self._fit is None else float(self._fit @ seen[:3] / seen[0]) * self._drift() * self.waits()

    def _drift(self) -> float:
        """By what the last steps have taken longer than the parts say."""
        assert self._fit is not None
        if self._count < 2 * RECENT:
            return 1.0
        explained = float(self._fit @ self._seen[0, :3])
        return min(MOST_DRIFT, max(1 / MOST_DRIFT, float(self._seen[0, 3]) / explained))

    def _explain(self) -> None:
        """Find the three parts, none below 0, by least squares of relative errors."""
        from scipy.optimize import nnls

        sizes = [size for size in self._sizes.values() if len(size) >= ENOUGH]
        if not sizes:
            return
        requests, tokens, _ = map(max, zip(*(sample for size in sizes for sample in size), strict=True))
        self._most = requests, tokens
        typical = np.array([[median(column) for column in zip(*size, strict=True)] for size in sizes])
        columns = np.column_stack([np.ones(len(sizes)), typical[:, :2]]) / typical[:, 2:]
        scale = np.maximum(columns.max(axis=0), 1e-300)
        ridge = np.sqrt(len(sizes)) * np.diag([0.0, RIDGE, RIDGE])
        found, _ = nnls(np.vstack([columns / scale, ridge]), np.concatenate([np.ones(len(sizes)), np.zeros(3)]))
        self._fit = found / scale


def _level(number: int) -> int:
    """Numbers within a factor of about 1.4 have one level."""
    return round(2 * math.log2(number)) if number > 0 else -1


def mean_of(numbers: Iterable[int]) -> int:
    """The mean, rounded up; 0 of none."""
    listed = list(numbers)
    return -(-sum(listed) // len(listed)) if listed else 0
