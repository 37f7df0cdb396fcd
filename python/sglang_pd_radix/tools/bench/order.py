"""Which side is measured first, and whether that makes a difference.

The sides take turns within each run; in every other run they do so the other way round. So each figure of on / off is
there twice: from the pairs in which off went first, and from those in which on did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .stats import Spread, paired_ratio

Document = dict[str, Any]
Side = TypeVar("Side")
#: What the order is looked at by.
FIGURES = ("requests_per_s", "ttft_p50_s", "itl_mean_s")
SHUFFLES = 9999


def in_order(sides: Sequence[Side], number: int) -> list[Side]:
    """Who is measured when in run ``number`` (from 1): as given in odd runs, the other way round in even ones.

    So of any two sides each goes first in every other run, and neighbours in time remain pairs.
    """
    return list(sides) if number % 2 else list(reversed(sides))


def ratios(entry: Document, below: str, above: str, key: str) -> tuple[list[float], list[float]]:
    """``above`` over ``below`` of one figure, pair by pair: those with ``below`` first, and those with ``above``."""
    runs = {(run["variant"], run["number"]): run for run in entry["runs"]}
    found: tuple[list[float], list[float]] = ([], [])
    for number in sorted({run["number"] for run in entry["runs"]}):
        one, other = runs.get((below, number)), runs.get((above, number))
        if one is None or other is None:  # a run that was cut off
            continue
        value = paired_ratio([other["figures"][key]], [one["figures"][key]])
        if value.runs:
            found[one["turn"] > other["turn"]].append(value.median)
    return found


@dataclass(frozen=True)
class Effect:
    """What it does to on / off that off goes first and not on: the geometric mean of the factor over ``workloads``,
    and how often a factor as far from 1 comes up if the pairs are given their order by lot."""

    factor: float
    chance: float
    workloads: int


def effect(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Effect | None:
    """Of `ratios` of several workloads; None where none has both orders. The lots are the same every time."""
    logs = [tuple([math.log(v) for v in values] for values in group) for group in groups if all(group)]
    if not logs:
        return None

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def factor(drawn: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
        return mean([mean(first) - mean(second) for first, second in drawn])

    seen = factor((first, second) for first, second in logs)
    lots, as_far = random.Random(0), 1
    for _ in range(SHUFFLES):
        drawn = []
        for first, second in logs:
            both = [*first, *second]
            lots.shuffle(both)
            drawn.append((both[: len(first)], both[len(first) :]))
        as_far += abs(factor(drawn)) >= abs(seen) - 1e-12
    return Effect(math.exp(seen), as_far / (SHUFFLES + 1), len(logs))


def table(
    entries: Sequence[Document], pairs: Sequence[tuple[str, str]], names: dict[str, str]
) -> tuple[list[str], list[list[str]]] | None:
    """Heading and rows: of each workload's first pair (below, above), on / off by which went first; None where no
    workload has both orders. names: what the figures are called."""
    heading = ["on / off, by which was first", *(f"{names[key]}: {who}" for key in FIGURES for who in ("off", "on"))]
    rows = []
    for entry, (below, above) in zip(entries, pairs, strict=True):
        found = [ratios(entry, below, above, key) for key in FIGURES]
        if all(all(group) for group in found):
            rows.append([f"({entry['key']})", *(_cell(values) for group in found for values in group)])
    return (heading, rows) if rows else None


def _cell(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})" if spread.runs > 1 else f"{spread.median:.2f}"


def sentence(entries: Sequence[Document], pairs: Sequence[tuple[str, str]], names: dict[str, str]) -> str:
    """What the order of the sides did, over all workloads; empty where none has both orders."""
    parts = []
    for key in FIGURES:
        found = effect(ratios(entry, *pair, key) for entry, pair in zip(entries, pairs, strict=True))
        if found:
            parts.append(f"{names[key]} {found.factor:.3f} times (by lot as far from 1: {found.chance:.0%})")
    if not parts:
        return ""
    return "Where off went first, on / off was that with on first: " + ", ".join(parts) + "."
