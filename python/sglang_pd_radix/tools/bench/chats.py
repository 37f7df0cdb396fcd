"""The table of a chat's sides, one a line: what its clients feel of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .stats import Spread

# Columns: heading, digits, and what is written, the second in brackets: figures of a run by their keys, with their
# units.
_COLUMNS = (
    ("requests/s", 2, (("requests_per_s", 1.0),)),
    ("TTFT of first turns p50 (p99), ms", 0, (("first_ttft_p50_s", 1e-3), ("first_ttft_p99_s", 1e-3))),
    ("TTFT of later turns p50 (p99), ms", 0, (("later_ttft_p50_s", 1e-3), ("later_ttft_p99_s", 1e-3))),
    ("ITL mean (p99), ms", 1, (("itl_mean_s", 1e-3), ("itl_p99_s", 1e-3))),
    ("long prompts beside, answered", 0, (("steady_requests", 1.0),)),
    ("their time p50, ms", 0, (("steady_p50_s", 1e-3),)),
)


def tables(entry: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Heading and rows, medians over the runs; none of a report that does not have the figures."""
    known = entry["runs"][0]["figures"]
    if "later_ttft_p50_s" not in known:
        return
    columns = [column for column in _COLUMNS if column[2][0][0] in known]

    def written(side: str, digits: int, parts: tuple[tuple[str, float], ...]) -> str:
        values = [_median(entry, side, key) / unit for key, unit in parts]
        first, *more = ("–" if math.isnan(value) else f"{value:.{digits}f}" for value in values)
        return first + "".join(f" ({value})" for value in more if first != "–")

    yield (
        ["side", *(heading for heading, _, _ in columns)],
        [[side, *(written(side, digits, parts) for _, digits, parts in columns)] for side in entry["variants"]],
    )


def _median(entry: dict[str, Any], side: str, key: str) -> float:
    return Spread.of([run["figures"][key] for run in entry["runs"] if run["variant"] == side]).median
