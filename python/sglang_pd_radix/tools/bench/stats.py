"""Percentiles, spreads over runs, and ratios of interleaved runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile, linearly interpolated; NaN if empty."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


#: Fewer values have no meaningful p99.
LEAST_FOR_P99 = 100


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; NaN for fewer than `LEAST_FOR_P99` values."""
    return percentile(values, 99) if len(values) >= LEAST_FOR_P99 else math.nan


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest value over runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From one value per run; NaN values are left out."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(float(np.median(known)), min(known), max(known), len(known))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios of neighbouring runs, so that a slower machine slows both."""
    pairs = [(a, b) for a, b in zip(numerators, denominators, strict=False) if b and not math.isnan(a + b)]
    return Spread.of([a / b for a, b in pairs])
