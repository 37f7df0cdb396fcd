"""The figures of several runs as charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.chart import Line, bar_chart, line_chart, stand_alone

COLORS = {"off": "#d97706", "today": "#9333ea", "new": "#2563eb", "share": "#059669"}
# Of the series of a run: where "running" is in a point, after the time.
RUNNING = 1

Figures = dict[str, Any]


def charts(results: Sequence[Figures]) -> dict[str, str]:
    """SVG files by name: bars of every workload that was run in all of the modes, lines of the published run."""
    modes = [mode for mode in COLORS if any(f["mode"] == mode for f in results)]
    runs = {(f["workload"], f["mode"]): f for f in results}
    keys = [k for k in dict.fromkeys(f["workload"] for f in results) if all((k, m) in runs for m in modes)]

    def bars(title: str, label: str, value: Callable[[Figures, Figures], float]) -> str:
        sides = [(m, COLORS[m], [value(runs[k, m], runs[k, modes[0]]) for k in keys]) for m in modes]
        return bar_chart(title, "workload", label, keys, sides)

    lines = [
        Line(m, COLORS[m], [(point[0], point[RUNNING]) for point in runs["published", m]["series"]])
        for m in modes
        if ("published", m) in runs
    ]
    found = {
        "sim-rate.svg": bars(
            f"Requests/s, over {modes[0]}", "ratio", lambda f, first: f["requests_per_s"] / first["requests_per_s"]
        ),
        "sim-ttft.svg": bars(f"TTFT p50, over {modes[0]}", "ratio", lambda f, first: f["ttft_p50"] / first["ttft_p50"]),
        "sim-bytes.svg": bars("KV sent, over the least possible", "ratio", lambda f, _: f["sent_over_least"]),
        "sim-running.svg": line_chart("Requests running on decode (published)", "seconds", "requests", lines),
    }
    return {name: stand_alone(svg) for name, svg in found.items() if svg}
