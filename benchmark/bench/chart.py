"""Charts as SVG text: lines and bars, in so little code that a report needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 56, 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line. Of several with the same ``name`` (runs of one variant) the first is in the legend."""

    name: str
    color: str
    points: Sequence[Point]
    opacity: float = 1.0
    dash: str = ""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most about ``most``: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within ``low`` to ``high``; of a wide range only the powers themselves."""
    factors = (1, 2, 5) if high < 300 * low else (1,)
    found = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [f * 10.0**exponent for f in factors if low <= f * 10.0**exponent <= high]
    return found


def short(value: float) -> str:
    """``value`` as a tick label."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:g}"


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    log_x: bool = False,
    top: float | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """An SVG element. ``top``: the end of the y axis (default: what the lines need). ``mark``: a horizontal line."""
    points = [point for line in lines for point in line.points]
    if log_x:
        points = [(x, y) for x, y in points if x > 0]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x, high_x = (min(xs), max(xs)) if log_x else (min(0.0, *xs, 0.0), max(xs))
    if high_x <= low_x:
        low_x, high_x = (low_x / 2, low_x * 2) if log_x else (low_x, low_x + 1)
    high_y = top or max([*ys, mark[0] if mark else 0]) * 1.05 or 1.0

    def place_x(x: float) -> float:
        if log_x:
            part = (math.log(max(x, low_x)) - math.log(low_x)) / (math.log(high_x) - math.log(low_x))
        else:
            part = (x - low_x) / (high_x - low_x)
        return _LEFT + part * (WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - _BOTTOM - y / high_y * (HEIGHT - _TOP - _BOTTOM)

    parts = _frame(title, x_label, y_label, [(place_y(t), short(t)) for t in ticks(0, high_y)])
    for tick in log_ticks(low_x, high_x) if log_x else ticks(low_x, high_x, 8):
        parts.append(_x_tick(place_x(tick), short(tick)))
    if mark:
        y = place_y(mark[0])
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" class="mark"/>')
        parts.append(f'<text x="{WIDTH - _RIGHT - 4}" y="{y - 4:.1f}" text-anchor="end">{escape(mark[1])}</text>')
    legend: dict[str, tuple[str, str]] = {}
    for line in lines:
        legend.setdefault(line.name, (line.color, line.dash))
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in line.points if not log_x or x > 0)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="1.6" '
            f'stroke-opacity="{line.opacity:g}" stroke-linejoin="round"{dash}/>'
        )
    parts += _legend(legend)
    return _svg(parts, title)


def bar_chart(
    title: str, x_label: str, y_label: str, groups: Sequence[str], bars: Sequence[tuple[str, str, Sequence[float]]]
) -> str:
    """An SVG element with one group of bars per entry of ``groups``. bars: (name, color, one value per group)."""
    if not groups or not bars:
        return ""
    high = max(max(values) for _, _, values in bars) * 1.05 or 1.0
    room = (WIDTH - _LEFT - _RIGHT) / len(groups)
    width = min(28.0, room * 0.8 / len(bars))

    def place_y(y: float) -> float:
        return HEIGHT - _BOTTOM - y / high * (HEIGHT - _TOP - _BOTTOM)

    parts = _frame(title, x_label, y_label, [(place_y(t), short(t)) for t in ticks(0, high)])
    for g, group in enumerate(groups):
        middle = _LEFT + room * (g + 0.5)
        parts.append(_x_tick(middle, group))
        for b, (name, color, values) in enumerate(bars):
            x = middle + (b - len(bars) / 2) * width
            y = place_y(values[g])
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{HEIGHT - _BOTTOM - y:.1f}" '
                f'fill="{color}"><title>{escape(name)}: {short(values[g])}</title></rect>'
            )
    parts += _legend({name: (color, "") for name, color, _ in bars})
    return _svg(parts, title)


_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:currentColor}.title{font-weight:600;font-size:14px}"
    ".grid{stroke:currentColor;stroke-opacity:.15}.axis{stroke:currentColor;stroke-opacity:.6}"
    ".mark{stroke:currentColor;stroke-opacity:.6;stroke-dasharray:2 3}"
)


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>{"".join(parts)}</svg>'
    )


def stand_alone(svg: str) -> str:
    """The same picture for a file of its own: on white, whatever page shows it."""
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return svg.replace("<svg ", '<svg color="#1f2937" ', 1).replace("</style>", "</style>" + background, 1) + "\n"


def _frame(title: str, x_label: str, y_label: str, y_ticks: Sequence[tuple[float, str]]) -> list[str]:
    bottom, middle = HEIGHT - _BOTTOM, _TOP + (HEIGHT - _TOP - _BOTTOM) / 2
    parts = [
        f'<text x="{_LEFT}" y="20" class="title">{escape(title)}</text>',
        f'<text x="{(WIDTH + _LEFT - _RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for y, label in y_ticks:
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<path d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}" class="axis"/>')
    return parts


def _x_tick(x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'


def _legend(names: dict[str, tuple[str, str]]) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, (color, dash) in names.items():
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path d="M{x:.0f} 38h18" stroke="{color}" stroke-width="3"{dashes}/>')
        parts.append(f'<text x="{x + 24:.0f}" y="42">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts
