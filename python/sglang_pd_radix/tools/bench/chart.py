"""Charts of a report: plain data, and pictures made by matplotlib, which is imported on demand."""

from __future__ import annotations

import importlib.util
import io
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line. ``band``: (x, least, greatest) of the values whose median it is."""

    name: str
    color: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


def median_line(name: str, color: str, runs: Sequence[Sequence[Point]]) -> Line:
    """The median of runs sampled at different times, and the band of all; a run counts until its last point."""
    import numpy

    runs = [run for run in runs if run]
    band, points = [], []
    for x in numpy.linspace(min(r[0][0] for r in runs), max(r[-1][0] for r in runs), 121) if runs else ():
        going = [run for run in runs if run[0][0] <= x <= run[-1][0]]
        left = [float(numpy.interp(x, [p[0] for p in run], [p[1] for p in run])) for run in going]
        if left:
            points.append((float(x), statistics.median(left)))
            band.append((float(x), min(left), max(left)))
    return Line(name, color, points, band if len(runs) > 1 else ())


@dataclass(frozen=True)
class Bars:
    """One bar per group of the chart."""

    name: str
    color: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines, or one group of bars per entry of ``groups``.

    note: subtitle. top: end of the y axis (default: from the data). mark: a horizontal line and its label.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    groups: Sequence[str] = ()
    bars: Sequence[Bars] = ()
    log_x: bool = False
    top: float | None = None
    mark: tuple[float, str] | None = None
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (any(line.points for line in self.lines) or (self.groups and self.bars))

    def picture(self) -> str:
        """An SVG file."""
        import matplotlib
        from matplotlib.figure import Figure

        # Keep text as text, and the file deterministic.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pd-radix", "font.size": 9}):
            figure = Figure(figsize=(5.6, 3.0), layout="constrained")
            axes = figure.add_subplot()
            for line in self.lines:
                points = self._drawn(line)
                axes.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=line.color,
                    linewidth=1.6,
                    label=line.name,
                )
                if line.band:
                    xs, low, high = zip(*line.band, strict=True)
                    axes.fill_between(xs, low, high, color=line.color, alpha=0.15, linewidth=0)
            width = 0.8 / max(1, len(self.bars))
            for i, bars in enumerate(self.bars):
                places = [g + (i - (len(self.bars) - 1) / 2) * width for g in range(len(self.groups))]
                axes.bar(places, bars.values, width * 0.95, color=bars.color, label=bars.name)
            if self.groups:
                axes.set_xticks(range(len(self.groups)), self.groups)
            if self.mark:
                axes.axhline(self.mark[0], color="#6b7280", linestyle=":", linewidth=1.2, label=self.mark[1])
            if self.log_x:
                axes.set_xscale("log")
            # Wrapped to fit any font: readers may lack ours.
            figure.suptitle(self.title, x=0.015, ha="left", fontsize=10, fontweight="bold")
            axes.set_title(
                "\n".join(textwrap.wrap(self.note, 86, break_on_hyphens=False)),
                loc="left",
                fontsize=7.5,
                color="#4b5563",
            )
            axes.set(xlabel=self.x_label, ylabel=self.y_label)
            axes.set_ylim(0, self.top)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, framealpha=0.8, edgecolor="none")
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        # Linters reject trailing blanks.
        return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"

    def _drawn(self, line: Line) -> list[Point]:
        return [(x, y) for x, y in line.points if x > 0 or not self.log_x]


def check_libraries() -> None:
    """Raise PdRadixError without matplotlib: before hours of measurements, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PdRadixError("the report needs matplotlib: pip install 'sglang-pd-radix[bench]'")
