"""`pd-radix bench --slo` as a command: what ends it, its options, and pages of the size that the workers have."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
from test_goodput import TOKENS, Served, options

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli, process_group
from sglang_pd_radix.tools.bench import command, deploy, goodput, workload

INFO = {"device": "cpu", "dtype": "float32", "page_size": 64}
SLO = ("--slo", "ttft=2000,itl=30")
LOAD = SimpleNamespace(wait_ready=lambda: None, words=range(400, 1900), close=lambda: None)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`pd-radix bench --slo` over sides that are formulas; `before` is called with the number of each run."""
    served = Served(monkeypatch)
    served.deployment.info = lambda variant: INFO
    made = SimpleNamespace(before=lambda number: None, asked=0, out=tmp_path)

    def run_once(*args):
        made.asked += 1
        made.before(made.asked)
        return served.run_once(*args)

    def run():
        sizes = ("--only", "e,d", "--set", "e.requests=400", "--set", "e.prompt=4", "--set", "e.answer=40")
        return cli.main(["bench", *SLO, *sizes, "--work-dir", str(tmp_path)])

    made.run = run
    monkeypatch.setattr(goodput, "run_once", run_once)
    monkeypatch.setattr(command, "Deployment", lambda *args, **more: contextlib.nullcontext(served.deployment))
    monkeypatch.setattr(command, "make_model", lambda *args: "m")
    monkeypatch.setattr(command, "check_may_switch", lambda *args: None)
    monkeypatch.setattr(command, "LoadGenerator", lambda *args: LOAD)
    return made


@contextlib.contextmanager
def as_usual(signum):
    """``signum`` does what it does where nobody says otherwise: under nohup it would be ignored."""
    was = signal.signal(signum, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signum, was)


def trials_written(out):
    (entry,) = json.loads((out / "goodput.json").read_text())["workloads"]
    assert entry["interrupted"] and "interrupted" in entry["problems"][0]
    return {name: len(trials) for name, trials in entry["trials"].items()}


# ---- what ends it ----


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_a_lost_terminal_costs_no_measurement(signum, bench):
    """A session that is dropped sends SIGHUP. Three runs warm the sides up."""
    bench.before = lambda number: number == 12 and os.kill(os.getpid(), signum)
    with as_usual(signum):
        assert bench.run() == 128 + signum
    assert trials_written(bench.out) == {"off": 3, "on": 3, "target": 2}
    assert "FAILED: interrupted" in (bench.out / "goodput.md").read_text()


@pytest.mark.parametrize("where", ["entry_of", "markdown"])
def test_a_shell_that_passes_the_signal_on_costs_no_measurement_either(where, bench, monkeypatch):
    """The second comes while the report is made, or written."""
    whole = getattr(goodput, where)

    def again(*args):
        os.kill(os.getpid(), signal.SIGHUP)
        return whole(*args)

    monkeypatch.setattr(goodput, where, again)
    bench.before = lambda number: number == 12 and os.kill(os.getpid(), signal.SIGHUP)
    with as_usual(signal.SIGHUP):
        assert bench.run() == 128 + signal.SIGHUP
    assert trials_written(bench.out) == {"off": 3, "on": 3, "target": 2}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_run_costs_no_measurement(bench, error):
    """What nobody foresaw, and Ctrl-C."""

    def fails(number):
        if number == 12:
            raise error

    bench.before = fails
    assert bench.run() == 1
    assert trials_written(bench.out) == {"off": 3, "on": 3, "target": 2}


def test_what_nobody_ends_goes_on_to_the_next_workload(bench):
    assert bench.run() == 0
    entries = json.loads((bench.out / "goodput.json").read_text())["workloads"]
    assert [(entry["key"], entry["interrupted"]) for entry in entries] == [("e", False), ("d", False)]


def test_nothing_is_held_back_afterwards(bench):
    bench.before = lambda number: number == 12 and os.kill(os.getpid(), signal.SIGTERM)
    with as_usual(signal.SIGTERM):
        bench.run()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.SIGTERM in process_group.ends()


# ---- rates of sides ----


def test_given_rates_are_of_the_sides():
    def check(rates):
        args = options(*SLO, "--only", "e", "--slo-rates", rates)
        command._check_slo(args, command.chosen_sides(args))

    check("off=1,target=2")
    with pytest.raises(PdRadixError, match="--slo-rates .*one of the sides off, on, target"):
        check("other=1")


# ---- pages ----


def test_pages_are_of_the_size_that_the_worker_has(monkeypatch):
    """Some attention backends take pages of 64 or 128 whatever was asked for."""
    seen = []
    monkeypatch.setattr(command, "measure_all", lambda *args: seen.append(args[4]) or {"key": "a", "problems": []})
    deployment = SimpleNamespace(variants=[SimpleNamespace(name="off")], info=lambda variant: INFO)
    monkeypatch.setattr(command, "Deployment", lambda *args, **more: contextlib.nullcontext(deployment))
    given = ("--work-dir", "r", "--only", "a", "--", "--attention-backend", "flashmla")
    args, document = options(*given), {"workloads": []}
    show = SimpleNamespace(now=lambda text: None, done=lambda text: None)
    command._all(args, command.chosen_sizes(args), [deploy.OFF], 1, "m", [], LOAD, document, show)
    assert seen == [64] and document["setting"]["page_size"] == 64


# ---- numbers that are none ----


@pytest.mark.parametrize(
    "given, said",
    [
        ([*SLO, "--slo-seconds", "nan"], "--slo-seconds nan: must be above 0 seconds, and a day at most"),
        ([*SLO, "--slo-seconds", "inf"], "--slo-seconds inf: must be"),
        ([*SLO, "--slo-seconds", "1e308"], "--slo-seconds 1e+308: must be"),
        ([*SLO, "--slo-seconds", "-1"], "--slo-seconds -1: must be"),
        (["--slo", "ttft=1e-323,itl=30"], "in milliseconds above 0"),
        (["--slo", "ttft=1e308,itl=30"], "in milliseconds above 0"),
        (["--set", "f.speed=nan"], "--set f.speed=nan: must be at least 0, and finite"),
        (["--set", "f.speed=inf"], "--set f.speed=inf: must be at least 0, and finite"),
        (["--", "--page-size", "x"], "--page-size x: must be a whole number of at least 1"),
        (["--", "--page-size=0"], "--page-size 0: must be a whole number of at least 1"),
        (["--", "--page-size", "1.5"], "--page-size 1.5: must be"),
    ],
)
def test_a_number_that_is_none_is_refused_in_one_line(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(command, "make_model", lambda *args: pytest.fail("it was not refused"))
    assert cli.main(["bench", "--work-dir", str(tmp_path), *given]) == 1
    error = capsys.readouterr().err
    assert re.search(re.escape(said), error) and len(error.splitlines()) == 1


def test_sizes_that_are_numbers_are_taken():
    sizes = {"f": workload.Trace()}
    workload.apply_settings(sizes, ["f.speed=0", "f.requests=3"])
    assert sizes["f"].make("f", TOKENS).requests == 3
