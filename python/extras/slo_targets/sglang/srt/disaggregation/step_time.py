"""Predicts the time of a decode step from measured steps.

Model: a fixed part, a part per request and a part per KV token read, fitted to the medians of many step sizes. Medians
ignore pauses. If two fits explain the samples, the one with the lower cost per request is used: the next steps test
it, but would never test a bound that is too low.

Clients see the mean, and steps that share cores or a GPU have a long tail. So the parts are scaled to the mean of
recent steps.

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

# Picoseconds per second: ranks agree on and compute with integers only.
PS = 10**12
# Samples kept per size; samples needed for a size to count; sizes kept.
KEPT, ENOUGH, MOST_SIZES = 9, 3, 128
# Steps between two fits, after the first ones.
REFIT = 16
# Steps that the metrics cover; bound of the ratio of the mean to the fit.
RECENT, MOST_DRIFT = 32, 2.0
# The mean covers the steps of so many answers, within bounds: an admitted request stays for one answer, and slow steps
# come by the dozen. A step counts at most so many times its prediction: a pause of a second says nothing about the
# next requests.
ANSWERS_SEEN, LEAST_SEEN, SEEN, MOST_SEEN = 4, 256, 1024, 12.0
# Keeps undetermined parts small.
RIDGE = 1e-3


class Parts(NamedTuple):
    """The parts of a step's time, picoseconds."""

    fixed: int
    per_request: int
    per_token: int

    def of(self, requests: int, tokens: int) -> int:
        """Predicted picoseconds of a step. tokens: KV tokens read."""
        return self.fixed + self.per_request * requests + self.per_token * tokens


class Estimate(NamedTuple):
    """What is known of decode steps, in integers; rank 0's is used on all ranks.

    milli_tokens: per request and step, thousandths. answer: mean tokens of recent answers, 0 if none has ended.
    requests, tokens: the largest measured step. delay: steps from admission to decode. waits: time between two tokens
    of a request over its step time, thousandths; above 1000 if it waits for other steps.
    """

    decode: Parts
    milli_tokens: int
    answer: int
    requests: int
    tokens: int
    delay: int = 0
    waits: int = 1000

    def figures(self) -> list[int]:
        return [*self.decode, *self[1:]]

    @classmethod
    def of(cls, figures: list[int]) -> Estimate | None:
        """The inverse of `figures`; None for zeros, which mean no estimate."""
        return cls(Parts(*figures[:3]), *figures[3:WIDTH]) if figures[3] else None


WIDTH = 9


class StepTimes:
    """Samples of steps, the fitted parts, and the mean."""

    def __init__(self) -> None:
        # Recent samples by size: requests, tokens, seconds. The most recent size is last.
        self._sizes: OrderedDict[tuple[int, int], deque[tuple[int, int, float]]] = OrderedDict()
        self._count = 0
        self._fit: np.ndarray | None = None
        self._most = 0, 0
        # Decaying sums for the mean (row 0) and the metrics (row 1), weighted by requests. Columns: steps, requests,
        # tokens, seconds, seconds waited before.
        self._seen = np.zeros((2, 5))
        self._forget = np.array([[2 / LEAST_SEEN], [2 / RECENT]])

    def expect(self, steps: int) -> None:
        """Set the number of steps per answer."""
        self._forget[0] = 2 / min(SEEN, max(LEAST_SEEN, ANSWERS_SEEN * steps))

    def note(self, requests: int, tokens: int, seconds: float, waited: float = 0.0) -> None:
        """Note a step that read ``tokens`` KV tokens. Cost: constant.

        waited: seconds in other steps for which its requests had waited before.
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
            # A worker's first steps may take seconds.
            self._seen[:] = 0
        most = MOST_SEEN * float(self._fit @ (1, requests, tokens))
        seen = np.array([1, requests, tokens, min(seconds, most), min(waited, most)])
        self._seen += requests * seen - self._forget * self._seen

    def parts(self) -> Parts | None:
        """The parts, scaled to the mean of recent steps; None before the first fit."""
        if self._fit is None:
            return None
        fixed, per_request, per_token = (PS * self._drift() * self._fit).tolist()
        return Parts(round(fixed), round(per_request), round(per_token))

    def most(self) -> tuple[int, int]:
        """The largest requests and tokens of a size with enough samples."""
        return self._most

    def waits(self) -> float:
        """Time between two tokens of a request over its own step time: 1 to `MOST_DRIFT`."""
        own, waited = self._seen[0, 3:].tolist()
        return min(MOST_DRIFT, 1 + waited / own) if own else 1.0

    def seconds(self) -> float | None:
        """Mean of recent steps, waits included; None before the first fit."""
        count, *_, own, waited = self._seen[1].tolist()
        return (own + waited) / count if count else None

    def seconds_explained(self) -> float | None:
        """The prediction for the same steps as `seconds`."""
        seen = self._seen[1]
        return None if self._fit is None else float(self._fit @ seen[:3] / seen[0]) * self._drift() * self.waits()

    def _drift(self) -> float:
        """Ratio of recent steps to the fit."""
        assert self._fit is not None
        if self._count < 2 * RECENT:
            return 1.0
        explained = float(self._fit @ self._seen[0, :3])
        return min(MOST_DRIFT, max(1 / MOST_DRIFT, float(self._seen[0, 3]) / explained))

    def _explain(self) -> None:
        """Fit the three parts: non-negative least squares of relative errors."""
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
    """A size class: numbers within a factor of about 1.4."""
    return round(2 * math.log2(number)) if number > 0 else -1


def mean_of(numbers: Iterable[int]) -> int:
    """The mean, rounded up; 0 if empty."""
    listed = list(numbers)
    return -(-sum(listed) // len(listed)) if listed else 0
