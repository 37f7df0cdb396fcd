"""The table of a workload's sides, one per line, with what clients see."""

from __future__ import annotations

import math
from typing import Any

from .stats import Spread

# Columns: heading, digits, and the figures of a run with their units; the second is in brackets.
_COLUMNS = (
    ("requests/s", 2, (("requests_per_s", 1.0),)),
    ("TTFT p50 (p99), ms", 0, (("ttft_p50_s", 1e-3), ("ttft_p99_s", 1e-3))),
    ("TTFT of first turns p50 (p99), ms", 0, (("first_ttft_p50_s", 1e-3), ("first_ttft_p99_s", 1e-3))),
    ("TTFT of later turns p50 (p99), ms", 0, (("later_ttft_p50_s", 1e-3), ("later_ttft_p99_s", 1e-3))),
    ("TTFT of turns 2 to 10 p50 (p99), ms", 0, (("early_ttft_p50_s", 1e-3), ("early_ttft_p99_s", 1e-3))),
    ("TTFT of turns from 11 on p50 (p99), ms", 0, (("late_ttft_p50_s", 1e-3), ("late_ttft_p99_s", 1e-3))),
    ("ITL p50 (p99), ms", 1, (("itl_p50_s", 1e-3), ("itl_p99_s", 1e-3))),
    ("ITL mean, ms", 1, (("itl_mean_s", 1e-3),)),
    ("later turns without prefill, %", 0, (("without_prefill", 0.01),)),
    ("KV sent / lower bound", 3, (("sent_over_least", 1.0),)),
    ("long prompts beside, answered", 0, (("steady_requests", 1.0),)),
    ("their time p50, ms", 0, (("steady_p50_s", 1e-3),)),
)


def table(entry: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows, medians over the runs."""
    known = entry["runs"][0]["figures"]
    hidden = "ttft_p50_s" if entry["chat"] else ""  # Of all turns: a first turn is another request than a later one.
    columns = [column for column in _COLUMNS if column[2][0][0] in known and column[2][0][0] != hidden]

    def written(side: str, digits: int, parts: tuple[tuple[str, float], ...]) -> str:
        values = [_median(entry, side, key) / unit for key, unit in parts]
        first, *more = ("–" if math.isnan(value) else f"{value:.{digits}f}" for value in values)
        return first + "".join(f" ({value})" for value in more if first != "–")

    return (
        ["side", *(heading for heading, _, _ in columns)],
        [[side, *(written(side, digits, parts) for _, digits, parts in columns)] for side in entry["variants"]],
    )


def _median(entry: dict[str, Any], side: str, key: str) -> float:
    return Spread.of([run["figures"][key] for run in entry["runs"] if run["variant"] == side]).median
