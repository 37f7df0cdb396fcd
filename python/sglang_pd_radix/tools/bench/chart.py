"""Line charts as pictures, made by matplotlib, which is imported on demand."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

Point = tuple[float, float]
#: Of off, on, and further sides in turn.
COLORS = ("#d97706", "#2563eb", "#059669", "#9333ea", "#db2777", "#6b7280")


@dataclass(frozen=True)
class Line:
    """One line. ``band``: (x, least, greatest) of the values whose median it is."""

    name: str
    color: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """note: subtitle."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(line.points for line in self.lines)

    def picture(self) -> str:
        """An SVG file."""
        import matplotlib
        from matplotlib.figure import Figure

        # Keep text as text, and the file deterministic.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pd-radix", "font.size": 9}):
            figure = Figure(figsize=(5.6, 3.0), layout="constrained")
            axes = figure.add_subplot()
            for line in self.lines:
                xs, ys = zip(*line.points, strict=True) if line.points else ((), ())
                axes.plot(xs, ys, color=line.color, linewidth=1.6, label=line.name)
                if line.band:
                    xs, low, high = zip(*line.band, strict=True)
                    axes.fill_between(xs, low, high, color=line.color, alpha=0.15, linewidth=0)
            # Wrapped to fit any font: readers may lack ours.
            figure.suptitle(self.title, x=0.015, ha="left", fontsize=10, fontweight="bold")
            axes.set_title(
                "\n".join(textwrap.wrap(self.note, 86, break_on_hyphens=False)),
                loc="left",
                fontsize=7.5,
                color="#4b5563",
            )
            axes.set(xlabel=self.x_label, ylabel=self.y_label)
            axes.set_ylim(0)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, framealpha=0.8, edgecolor="none")
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        # Linters reject trailing blanks.
        return "\n".join(text.rstrip() for text in file.getvalue().splitlines()) + "\n"


def check_libraries() -> None:
    """Raise PdRadixError without matplotlib: before minutes of measurements, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PdRadixError("the picture needs matplotlib: pip install 'sglang-pd-radix[bench]'")
