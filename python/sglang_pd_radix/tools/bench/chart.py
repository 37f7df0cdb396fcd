"""Charts of a report: what they show, as plain data, and the pictures that matplotlib makes of it.

It is not imported before it is needed.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line. Of several with the same ``name`` (runs of one variant) the first is in the legend."""

    name: str
    color: str
    points: Sequence[Point]
    opacity: float = 1.0


@dataclass(frozen=True)
class Bars:
    """One bar per group of the chart."""

    name: str
    color: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Lines, or one group of bars per entry of ``groups``.

    top: the end of the y axis (default: what the data needs). mark: a horizontal line and what it is called.
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

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (any(line.points for line in self.lines) or (self.groups and self.bars))

    def picture(self) -> str:
        """An SVG file."""
        import matplotlib
        from matplotlib.figure import Figure

        # Text stays text, and the same data gives the same file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pd-radix", "font.size": 9}):
            figure = Figure(figsize=(5.6, 3.0), layout="constrained")
            axes = figure.add_subplot()
            named: set[str] = set()
            for line in self.lines:
                points = self._drawn(line)
                axes.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=line.color,
                    alpha=line.opacity,
                    linewidth=1.4,
                    label=None if line.name in named else line.name,
                )
                named.add(line.name)
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
            axes.set_title(self.title, loc="left", fontsize=10, fontweight="bold")
            axes.set(xlabel=self.x_label, ylabel=self.y_label)
            axes.set_ylim(0, self.top)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        # Not what XML parsers and linters of documents stumble over: trailing blanks.
        return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"

    def _drawn(self, line: Line) -> list[Point]:
        return [(x, y) for x, y in line.points if x > 0 or not self.log_x]


def check_libraries() -> None:
    """Raise PdRadixError where the library that draws is missing: before hours of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PdRadixError("the report needs matplotlib: pip install 'sglang-pd-radix[bench]'")
