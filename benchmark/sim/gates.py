"""Whether the published outcomes come out."""

from __future__ import annotations

from sim.published import OUTCOMES, Outcome, Runs


def closed(runs: Runs) -> list[Outcome]:
    """The outcomes whose gate is closed."""
    return [outcome for outcome in OUTCOMES if not outcome.holds(outcome.read(runs))]


def report(runs: Runs) -> str:
    """All outcomes as Markdown: as published, as simulated, and the verdicts in words."""
    rows = [
        "| outcome | published | simulated | off by | may be | |",
        "|---|---|---|---|---|---|",
    ]
    words = []
    missed = closed(runs)
    for outcome in OUTCOMES:
        simulated = outcome.read(runs)
        by, bound = outcome.off_by(simulated), outcome.tolerance
        of = f"fitted: {outcome.fits}" if outcome.fits else "**predicted**"
        shown, told = _shown(simulated, outcome.unit), ", ".join(_shown(v, outcome.unit) for v in outcome.published)
        rows.append(f"| {outcome.name} | {told} | {shown} | {by:+.1%} | {bound:.0%} | {of} |")
        if outcome in missed:
            verb = "fitted, and yet" if outcome.fits else "predicted"
            words.append(
                f"CLOSED: {outcome.name}: {verb} {shown}, published {told}: off by {by:+.0%}, where {bound:.0%} may be"
            )
    words += [f"{tolerance:.0%}: {why}" for tolerance, why in dict.fromkeys((o.tolerance, o.why) for o in OUTCOMES)]
    held = [outcome for outcome in OUTCOMES if not outcome.fits]
    came = sum(outcome not in missed for outcome in held)
    words.append(f"{came} of {len(held)} outcomes that no constant was fitted to are predicted")
    return "\n".join([*rows, "", *words])


def _shown(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{1e3 * value:.1f} ms"
    if not unit:
        return f"{value:.0f}"
    text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return f"{text} {unit}".replace(" 1/s", "/s")
