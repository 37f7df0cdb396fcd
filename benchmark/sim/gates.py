"""Whether the published outcomes come out, and how far each constant may be moved before one does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.constants import Constant
from sim.published import OFF, ON, OUTCOMES, Outcome, Runs

Run = Callable[[str, list[str]], Mapping[str, Any]]
# By so much a constant is multiplied and divided in looking for the first gate that closes.
FACTORS = (1.2, 2.0, 10.0, 100.0)
# Its edge is known to so much.
WITHIN = 1.1


def judged(runs: Runs) -> list[tuple[Outcome, float]]:
    """The outcomes that these modes can tell, as simulated."""
    return [(outcome, outcome.read(runs)) for outcome in OUTCOMES if set(outcome.needs) <= set(runs)]


def closed(runs: Runs) -> list[Outcome]:
    """Those whose gate is closed. What says the same as another outcome has none of its own."""
    return [outcome for outcome, simulated in judged(runs) if not outcome.same_as and not outcome.holds(simulated)]


def report(runs: Runs) -> str:
    """All outcomes as Markdown: as published, as simulated, and the verdicts in words."""
    rows = [
        "| outcome | published | simulated | off by | may be | |",
        "|---|---|---|---|---|---|",
    ]
    words = []
    for outcome, simulated in judged(runs):
        by, bound = outcome.off_by(simulated), outcome.tolerance
        if outcome.fits:
            of = f"fitted: {outcome.fits}"
        elif outcome.same_as:
            of = f"as {outcome.same_as}"
        else:
            of = "**predicted**"
        told = _told(outcome)
        may_be = "" if outcome.same_as else f"{bound:.0%}"
        rows.append(f"| {outcome.name} | {told} | {_shown(simulated, outcome.unit)} | {by:+.1%} | {may_be} | {of} |")
        if not outcome.same_as and not outcome.holds(simulated):
            verb = "fitted, and yet" if outcome.fits else "predicted"
            words.append(
                f"CLOSED: {outcome.name}: {verb} {_shown(simulated, outcome.unit)}, published {told}: "
                f"off by {by:+.0%}, where {bound:.0%} may be"
            )
    for tolerance, why in dict.fromkeys((o.tolerance, o.why) for o, _ in judged(runs) if not o.same_as):
        words.append(f"{tolerance:.0%}: {why}")
    held = [outcome for outcome, _ in judged(runs) if not outcome.fits and not outcome.same_as]
    missed = [outcome for outcome in closed(runs) if outcome in held]
    words.append(f"{len(held) - len(missed)} of {len(held)} outcomes that no constant was fitted to are predicted")
    return "\n".join([*rows, "", *words])


def draws(runs: Sequence[Runs]) -> str:
    """The outcomes of several draws of the workload as Markdown, and which of their means would close a gate.

    Which request has which prefix was drawn in the published run too, and is not known.
    """
    rows = [
        f"| outcome | published | {' | '.join(f'draw {n}' for n in range(len(runs)))} | mean | off by | |",
        f"|---|---|{'---|' * len(runs)}---|---|---|",
    ]
    found = []
    for outcome in OUTCOMES:
        if outcome.same_as:
            continue
        values = [outcome.read(one) for one in runs]
        mean = sum(values) / len(values)
        told, shown = _told(outcome), [_shown(value, outcome.unit) for value in (*values, mean)]
        of = f"fitted: {outcome.fits}" if outcome.fits else "**predicted**"
        rows.append(f"| {outcome.name} | {told} | {' | '.join(shown)} | {outcome.off_by(mean):+.1%} | {of} |")
        if not outcome.holds(mean):
            verb = "fitted to one draw" if outcome.fits else "predicted"
            found.append(
                f"FINDING: {outcome.name}: {verb}, on average of {len(runs)} draws {shown[-1]}, published {told}: "
                f"off by {outcome.off_by(mean):+.0%}"
            )
    return "\n".join([*rows, "", *found])


def _told(outcome: Outcome) -> str:
    return ", ".join(_shown(value, outcome.unit) for value in outcome.published)


def _shown(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{1e3 * value:.1f} ms"
    if not unit:
        return f"{value:.0f}"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return f"{text} {unit}".replace(" 1/s", "/s")


@dataclass(frozen=True)
class Edge:
    """How far a constant can be moved one way. factor: from there on the gate of ``outcome`` is closed; None: never.

    spot: a factor at which one is closed, that of ``spot_outcome``, though farther out all are open again. That is not
    the constant but the course of the run, which any change moves a little.
    """

    factor: float | None
    outcome: str = ""
    spot: float | None = None
    spot_outcome: str = ""

    def __str__(self) -> str:
        text = "never" if self.factor is None else f"{_times(self.factor)}: {self.outcome}"
        return text if self.spot is None else f"{text} (but at {_times(self.spot)}: {self.spot_outcome})"


def _times(factor: float) -> str:
    return f"{max(factor, 1 / factor):.2g}"


def edge(constant: Constant, up: bool, run: Run) -> Edge:
    """How far ``constant`` may be multiplied (``up``) or divided before gates stay closed, within a factor of 100.

    Tried at `FACTORS`, outwards until one is closed at two in a row (farther out a run can take minutes), and then
    between the last at which all are open and the next.
    """

    def first(factor: float) -> str:
        return _first(constant, factor, up, run)

    tried: dict[float, str] = {}
    for factor in FACTORS:
        tried[factor] = first(factor)
        if len(tried) > 1 and all(list(tried.values())[-2:]):
            break
    low = max((factor for factor in tried if not tried[factor]), default=1.0)
    spot = next((factor for factor in tried if tried[factor] and factor < low), None)
    seen = (spot if up or spot is None else 1 / spot, tried[spot] if spot else "")
    if low == FACTORS[-1]:
        return Edge(None, "", *seen)
    high = min(factor for factor in tried if factor > low)
    name = tried[high]
    while high / low > WITHIN:
        middle = (low * high) ** 0.5
        if closes := first(middle):
            high, name = middle, closes
        else:
            low = middle
    return Edge(high if up else 1 / high, name, *seen)


def _first(constant: Constant, factor: float, up: bool, run: Run) -> str:
    """The name of a gate that this closes; "" if none. One mode after the other, for time."""
    settings = constant.times(factor if up else 1 / factor)
    runs: dict[str, Mapping[str, Any]] = {}
    for mode in (OFF, ON):
        try:
            runs[mode] = run(mode, settings)
        except (AssertionError, RuntimeError) as error:
            return f"{mode} does not run: {error}"
        if gates := closed(runs):
            return max(gates, key=lambda outcome: abs(outcome.off_by(outcome.read(runs))) / outcome.tolerance).name
    return ""


def sensitivity(constants: Sequence[Constant], run: Run, told: Callable[[str], None]) -> str:
    """The edges of all constants as Markdown, and which of them the data do not tell. told: each row as it comes."""
    rows = [
        "| constant | value | | divided by, and what closes | multiplied by, and what closes |",
        "|---|---|---|---|---|",
    ]
    unknown = []
    for constant in constants:
        down, up = (edge(constant, way, run) for way in (False, True))
        rows.append(f"| {constant.name} | {constant.value():.4g} | {constant.kind} | {down} | {up} |")
        told(rows[-1])
        if down.factor is None and up.factor is None:
            unknown.append(constant.name)
    if unknown:
        rows += ["", f"Not identified by the data, from a hundredth to a hundred times: {', '.join(unknown)}."]
    return "\n".join(rows)
