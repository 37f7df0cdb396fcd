"""Percentiles, spreads over runs, and ratios of interleaved runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile, linear between the two nearest ranks (numpy's default); NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantiles(values: Sequence[float], count: int = 100) -> list[float]:
    """``count`` + 1 evenly spaced percentiles, from the least to the greatest value: a distribution in few numbers."""
    if not values:
        return []
    ordered = sorted(values)
    found = []
    for i in range(count + 1):
        place = (len(ordered) - 1) * i / count
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    return found


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of a figure over runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value per run; NaN values (a figure that a run does not have) are left out."""
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(statistics.median(known), min(known), max(known), len(known))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratios of runs that were next to each other in time, so that a machine that slows down slows both."""
    pairs = [(a, b) for a, b in zip(numerators, denominators, strict=False) if b and not math.isnan(a + b)]
    return Spread.of([a / b for a, b in pairs])
