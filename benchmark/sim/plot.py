"""The figures of several runs as charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_pd_radix.tools.bench.chart import Bars, Chart, Line

COLORS = {"off": "#d97706", "today": "#9333ea", "new": "#2563eb", "share": "#059669"}
# Of the series of a run: where "running" is in a point, after the time.
RUNNING = 1

Figures = dict[str, Any]


def charts(results: Sequence[Figures]) -> dict[str, Chart]:
    """Charts by the names of their files: bars of every workload, lines of the published run.

    Of a workload that was not run in some mode there is no bar for that.
    """
    modes = [mode for mode in COLORS if any(f["mode"] == mode for f in results)]
    runs = {(f["workload"], f["mode"]): f for f in results}
    keys = [k for k in dict.fromkeys(f["workload"] for f in results) if (k, modes[0]) in runs]

    def bars(title: str, value: Callable[[Figures, Figures], float]) -> Chart:
        sides = [
            Bars(m, COLORS[m], [value(runs[k, m], runs[k, modes[0]]) if (k, m) in runs else 0.0 for k in keys])
            for m in modes
        ]
        return Chart(title, "workload", "ratio", groups=keys, bars=sides)

    first = modes[0]
    lines = [
        Line(m, COLORS[m], [(point[0], point[RUNNING]) for point in runs["published", m]["series"]])
        for m in modes
        if ("published", m) in runs
    ]
    found = {
        "sim-rate.svg": bars(f"Requests/s, over {first}", lambda f, off: f["requests_per_s"] / off["requests_per_s"]),
        "sim-ttft.svg": bars(f"TTFT p50, over {first}", lambda f, off: f["ttft_p50"] / off["ttft_p50"]),
        "sim-bytes.svg": bars("KV sent, over the least possible", lambda f, _: f["sent_over_least"]),
        "sim-running.svg": Chart("Requests running on decode (published)", "seconds", "requests", lines),
    }
    return {name: chart for name, chart in found.items() if not chart.empty}
