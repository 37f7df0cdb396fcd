"""Whether the published outcomes come out."""

from __future__ import annotations

from sim.published import OUTCOMES, Outcome, Runs


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


def _told(outcome: Outcome) -> str:
    return ", ".join(_shown(value, outcome.unit) for value in outcome.published)


def _shown(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{1e3 * value:.1f} ms"
    if not unit:
        return f"{value:.0f}"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return f"{text} {unit}".replace(" 1/s", "/s")
