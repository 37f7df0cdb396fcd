"""Where a pair loses against ordinary servers: one size of a workload varied, and both sides of each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Figures = dict[str, Any]
# Heading, key of a figure, what it is divided by, digits, and whether more is better.
COMPARED = (
    ("requests/s", "requests_per_s", 1.0, 2, True),
    ("TTFT p50, s", "ttft_p50", 1.0, 2, False),
    ("TTFT p99, s", "ttft_p99", 1.0, 1, False),
    ("ITL p50, ms", "itl_p50", 1e-3, 1, False),
    ("ITL p99, ms", "itl_p99", 1e-3, 1, False),
)
# What is within this part of the other's is no loss.
NOISE = 0.05


def loses(pair: Figures, ordinary: Figures) -> list[str]:
    """The figures in which the pair is worse by more than `NOISE`."""
    found = []
    for heading, key, _, _, more in COMPARED:
        better, worse = (pair[key], ordinary[key]) if more else (ordinary[key], pair[key])
        if worse > better * (1 + NOISE):
            found.append(heading.partition(",")[0])
    return found


def vary(
    given: str, modes: Sequence[str], simulate: Callable[[str, str], Figures], tell: Callable[[Figures], None]
) -> str:
    """A table as Markdown, a row for each value of ``given``, "NAME=VALUE,..."; of ``modes`` the pair's and the other.

    simulate: of a mode, with a setting. Raises ValueError for a name that it does not know.
    """
    name, _, values = given.partition("=")
    headings = [name, *(heading for heading, *_ in COMPARED), f"{modes[0]} loses in"]
    rows = []
    for value in values.split(","):
        pair, ordinary = (simulate(mode, f"{name}={value}") for mode in modes)
        cells = [
            ", ".join(f"{figures[key] / unit:.{digits}f}" for figures in (pair, ordinary))
            for _, key, unit, digits, _ in COMPARED
        ]
        for figures in (pair, ordinary):
            tell(figures)
        rows.append([value, *cells, ", ".join(loses(pair, ordinary)) or "nothing"])
    lines = [headings, ["---"] * len(headings), *rows]
    return f"{modes[0]}, {modes[1]}:\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)
