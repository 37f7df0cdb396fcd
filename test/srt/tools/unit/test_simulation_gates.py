"""benchmark/simulate.py --check: whether what was published comes out, and a wrong constant is seen."""

from __future__ import annotations

import math
import sys

import pytest
import simulate
from sim.figures import steady
from sim.gates import closed, report
from sim.published import OFF, ON, OUTCOMES
from sim.times import published

# Figures with which every outcome is as published.
RUNS = {
    OFF: dict(peak_running=37, requests_per_s=1.22, itl_mean=0.0654, ttft_p50=72.5, latency_p50=98.0, seconds=804.0),
    ON: dict(steady_running=110, requests_per_s=1.6, itl_mean=0.132, ttft_p50=7.9, latency_p50=70.7, seconds=622.0),
}
# What each outcome is read from.
READ = {
    "running at most, off": (OFF, "peak_running"),
    "requests/s, off": (OFF, "requests_per_s"),
    "ITL mean, off": (OFF, "itl_mean"),
    "ITL mean, on": (ON, "itl_mean"),
    "TTFT p50, on": (ON, "ttft_p50"),
    "requests/s, on": (ON, "requests_per_s"),
    "requests/s, on / off": (ON, "requests_per_s"),
    "TTFT p50, off": (OFF, "ttft_p50"),
    "latency p50, off": (OFF, "latency_p50"),
    "latency p50, on": (ON, "latency_p50"),
    "running steadily, on": (ON, "steady_running"),
}


def moved(mode: str, figure: str, factor: float) -> dict[str, dict[str, float]]:
    runs = {name: dict(figures) for name, figures in RUNS.items()}
    runs[mode][figure] *= factor
    return runs


def test_every_outcome_is_read_here():
    assert [outcome.name for outcome in OUTCOMES if not outcome.same_as] == list(READ)


def test_what_is_published_in_two_units_has_one_gate():
    for outcome in OUTCOMES:
        if outcome.same_as:
            assert outcome.same_as in READ
            # Of what was published last, within what is rounded.
            one = next(o for o in OUTCOMES if o.name == outcome.same_as).published[-1]
            assert outcome.published[0] in (pytest.approx(355.4 * one, rel=1e-3), pytest.approx(1000 / one, rel=1e-3))
            assert f"| {outcome.name} |" in report(RUNS)


def test_as_published_all_gates_are_open():
    assert closed(RUNS) == []
    assert "CLOSED" not in report(RUNS)


@pytest.mark.parametrize("factor", [0.6, 1.6])
@pytest.mark.parametrize("name", READ)
def test_a_figure_that_is_off_closes_its_gate(name, factor):
    runs = moved(*READ[name], factor)
    assert name in [outcome.name for outcome in closed(runs)]
    assert f"CLOSED: {name}: " in report(runs)


def test_no_gate_is_wider_than_what_it_is_to_tell():
    for outcome in OUTCOMES:
        assert outcome.tolerance <= (0.3 if outcome.name == "TTFT p50, on" else 0.1), outcome.name
        assert outcome.why or outcome.same_as, outcome.name


def test_what_lies_between_the_two_published_runs_is_not_off():
    outcome = next(o for o in OUTCOMES if o.name == "requests/s, off")
    assert outcome.off_by(1.22) == 0
    assert outcome.off_by(1.21 * 0.9) == pytest.approx(-0.1)
    assert outcome.off_by(1.2433 * 1.1) == pytest.approx(0.1)


def test_one_mode_alone_is_judged_by_its_own_outcomes():
    assert closed({OFF: {**RUNS[OFF], "itl_mean": 1.0}})[0].name == "ITL mean, off"
    assert closed({OFF: RUNS[OFF]}) == []


def test_what_runs_in_the_middle_of_a_run():
    # Looked at ten times as often while it is cold.
    cold = [(at / 10, 5, 0, 0, 0) for at in range(249)]
    series = [*cold, *((float(at), 80 if at <= 75 else 20, 0, 0, 0) for at in range(25, 101))]
    assert steady(series) == 80


def command(monkeypatch, runs, *options: str) -> int:
    """`simulate.py OPTIONS` with these figures instead of a run's."""

    def simulated(key, mode, settings):
        assert key == "published"
        return {"workload": key, "mode": mode, **runs[mode], "settings": settings}

    monkeypatch.setattr(simulate, "simulate", simulated)
    monkeypatch.setattr(simulate, "line", lambda figures: "")
    monkeypatch.setattr(sys, "argv", ["simulate.py", *options])
    return simulate.main()


def test_the_command_ends_with_an_error_when_a_gate_closes(monkeypatch, capsys):
    assert command(monkeypatch, RUNS, "--check") == 0
    assert "**predicted**" in capsys.readouterr().out
    assert command(monkeypatch, moved(ON, "latency_p50", 1.2), "--check") == 1
    assert "CLOSED: latency p50, on: predicted 84.8 s, published 70.7 s: off by +20%" in capsys.readouterr().out


def simulated_runs(settings: list[str]) -> dict:
    return {mode: simulate.simulate("published", mode, settings) for mode in (OFF, ON)}


def test_the_published_run_comes_out():
    """Both modes in full: 1000 requests each."""
    runs = simulated_runs([])
    assert [outcome.name for outcome in closed(runs)] == []


# What one gate of 15% on the ratio of requests/s had let pass.
TOLD = [("bandwidth", 0.5), ("step", 0.5), ("step", 2), ("step_token", 0.5), ("step_token", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "factor"), TOLD)
def test_a_constant_that_is_wrong_closes_a_gate(name, factor):
    assert closed(simulated_runs([f"times.{name}={factor * getattr(published(), name)!r}"]))


def test_a_figure_that_is_no_number_closes_its_gate():
    assert not any(outcome.holds(math.nan) for outcome in OUTCOMES)
