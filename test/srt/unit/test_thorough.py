"""`pd-radix verify --thorough`: how time is shared out, what comes of a part whatever happens in it, and the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.doctor import Check
from sglang_pd_radix.tools.thorough import child, command, host, report, runner
from sglang_pd_radix.tools.thorough.budget import Claim, allot
from sglang_pd_radix.tools.thorough.outcome import (
    FAILED,
    PASSED,
    SKIPPED,
    UNJUDGED,
    Outcome,
    Picture,
    Table,
    overall,
)
from sglang_pd_radix.tools.thorough.runner import Part, Step, read_json, run_all, without_result

# ---- time


def test_time_is_shared_out_in_the_order_of_worth():
    claims = [Claim("first", 3, 60), Claim("long", 1, 300), Claim("last", 1, 30)]
    assert allot(claims, 790) == {"first": 60 + 400 * 3 / 5, "long": 380, "last": 110}
    # The long one has no room, and what is left is enough for the last.
    assert allot(claims, 100) == {"first": 60 + 10 * 3 / 4, "last": 32.5}
    assert allot(claims, 80) == {"first": 80}
    assert allot(claims, 59) == {"last": 59} and allot(claims, 20) == {} and allot([], 20) == {}
    for seconds in (30, 61, 90, 360, 391, 4000):
        assert sum(allot(claims, seconds).values()) == pytest.approx(seconds)


# ---- runs


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def leaves(text: str = "{}", before: str = "") -> str:
    """Code that leaves a result in the directory of its step."""
    return f"{before}\nimport sys, pathlib; pathlib.Path('RESULT').write_text('''{text}''')"


def part(name: str, code: str, *more: Step, share: float = 1, least_s: float = 0, needs: str = "") -> Part:
    """One whose command is ``code``, in which RESULT stands for the file of its result."""

    def steps(directory: Path, seconds: float) -> list[Step]:
        here = code.replace("RESULT", str(directory / "only" / "result"))
        return [Step("only", python(here)), *more]

    def read(done: list[runner.Done]) -> Outcome:
        found = read_json(done[0].result / "result")
        return without_result(done[0]) if found is None else Outcome(found.get("verdict", PASSED), lines=[name])

    return Part(name, f"the part {name}", share, least_s, lambda: needs, steps, read)


def run(parts: list[Part], directory: Path, seconds: float = 60, **more) -> dict[str, Outcome]:
    told: list[set[str]] = []
    outcomes = run_all(parts, directory, seconds, lambda known: told.append(set(known)), lambda text: None, **more)
    assert told[-1] == set(outcomes), "the last report has all parts"
    return outcomes


def test_a_part_that_crashes_is_its_own_verdict(tmp_path):
    broken = part("read", leaves("[]"))  # a list has no verdict
    outcomes = run([part("dies", "print('so it was'); exit(3)"), broken, part("well", leaves())], tmp_path)
    assert [outcome.verdict for outcome in outcomes.values()] == [FAILED, FAILED, PASSED]
    assert "exit status 3" in outcomes["dies"].why and outcomes["dies"].tail == ["so it was"]
    assert "AttributeError" in outcomes["read"].why
    own = part("says", "import sys; print('pd-radix: no model at x', file=sys.stderr); exit(1)")
    assert run([own], tmp_path)["says"].why.endswith(": no model at x")


def test_half_a_result_is_none(tmp_path):
    """Of a step that was stopped while it wrote: it may be done again. Of one that ended by itself, it has crashed."""
    half = leaves('{"workloads": [{"ti')
    outcomes = run([part("slow", f"{half}\nimport time; time.sleep(600)"), part("ends", half)], tmp_path, seconds=6)
    assert outcomes["slow"].verdict == UNJUDGED and not outcomes["slow"].finished
    assert outcomes["ends"].verdict == FAILED and "without a result" in outcomes["ends"].why


def test_a_part_that_overruns_is_stopped_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    # A server in a session of its own, and one that does not end when asked.
    stubborn = f"""
import os, signal, subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{server.pid}}")
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(600)
"""
    began = time.monotonic()
    ended = child.run(python(stubborn), {}, tmp_path / "log", 3, grace_s=0.5)
    assert ended.stopped and ended.code == -signal.SIGKILL and time.monotonic() - began < 15
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())

    steps = Step("late", python("print('never begun')"))
    polite = part(
        "long", "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('asked to end'); raise", steps
    )
    outcomes = run([polite, part("next", leaves(), share=30)], tmp_path / "parts", 60)
    stopped = outcomes["long"]
    assert stopped.verdict == UNJUDGED and "only was stopped after" in stopped.why and not stopped.finished
    assert "asked to end" in stopped.tail and len(stopped.commands) == 1
    assert outcomes["next"].verdict == PASSED


def test_a_result_does_not_hide_that_a_command_crashed(tmp_path):
    says = "import sys; print('pd-radix: decode ended', file=sys.stderr)"
    outcome = run([part("one", leaves(before=says) + "\nexit(3)")], tmp_path)["one"]
    assert outcome.verdict == FAILED and outcome.why == "only ended with exit status 3: decode ended"
    assert outcome.lines[0] == "one" and outcome.tail
    # The last one's status says that something could not be judged, where it says so; one before it has crashed.
    unjudged = leaves('{"verdict": "NOT JUDGED"}') + "\nexit(1)"
    assert run([part("last", unjudged)], tmp_path)["last"].verdict == UNJUDGED
    assert run([part("first", unjudged, Step("next", python("")))], tmp_path)["first"].verdict == FAILED
    crash = [Step("make", python("exit(4)")), Step("long", python("import time; time.sleep(600)"))]
    outcome = run([part("then", leaves(), *crash)], tmp_path, 3)["then"]
    assert outcome.verdict == FAILED and outcome.why.startswith("make ended with exit status 4; then long was stopped")


def test_an_optional_step_that_overruns_leaves_the_rest_as_it_is(tmp_path):
    late = Step("more", python("import time; time.sleep(600)"), optional=True)
    outcome = run([part("two", leaves(), late)], tmp_path, 4)["two"]
    assert outcome.verdict == PASSED and outcome.finished and "more was stopped after" in outcome.lines[-1]
    asked = iter([False] * 8)
    outcome = run([part("both", leaves(), late)], tmp_path, 60, asked_to_end=lambda: next(asked, True))["both"]
    assert outcome.verdict == UNJUDGED and not outcome.finished, "interrupted it is not whole"


def test_what_the_disk_refuses_costs_one_part(tmp_path):
    gone = part("gone", "import shutil, pathlib; shutil.rmtree(pathlib.Path('RESULT').parents[1])")
    (tmp_path / "taken").write_text("a file in the place of a directory")
    outcomes = run([gone, part("taken", leaves())], tmp_path)
    assert [o.verdict for o in outcomes.values()] == [FAILED, PASSED]
    assert "its record cannot be written" in outcomes["gone"].why and not outcomes["gone"].finished


def test_what_failed_before_it_was_stopped_has_failed(tmp_path):
    wrong = leaves('{"verdict": "FAILED"}') + "\nimport time; time.sleep(600)"
    outcome = run([part("both", wrong)], tmp_path, 4)["both"]
    assert outcome.verdict == FAILED and "stopped" in outcome.why and not outcome.finished
    well = leaves() + "\nimport time; time.sleep(600)"
    outcome = run([part("half", well)], tmp_path, 4)["half"]
    assert outcome.verdict == UNJUDGED and outcome.lines == ["half"], "what there is of it is told"


def test_what_is_finished_is_not_repeated_and_what_is_not_begins_anew(tmp_path):
    count = tmp_path / "count"
    counting = part("counts", leaves(before=f"open({str(count)!r}, 'a').write('x')"))
    failing = part("fails", leaves('{"verdict": "FAILED"}', before=f"open({str(count)!r}, 'a').write('y')"))
    interrupted = part("slow", leaves() + "\nimport time; time.sleep(600)")
    parts = tmp_path / "parts"
    first = run([counting, failing, interrupted], parts, 10)
    assert [o.verdict for o in first.values()] == [PASSED, FAILED, UNJUDGED]
    left = parts / "slow" / "left"
    left.write_text("of the first time")
    second = run([counting, failing, part("slow", leaves())], parts)
    assert count.read_text() == "xy"
    assert all(second[n].seconds == first[n].seconds and second[n].why == first[n].why for n in ("counts", "fails"))
    assert second["slow"].verdict == PASSED and not left.exists()
    # One whose record is not whole has not finished.
    (parts / "counts" / runner.OUTCOME).write_text("{")
    assert run([counting], parts)["counts"].verdict == PASSED and count.read_text() == "xyx"


def test_what_this_host_lacks_is_skipped_and_looked_at_again(tmp_path):
    assert run([part("gpus", "exit(1)", needs="it takes two GPUs")], tmp_path)["gpus"].verdict == SKIPPED
    assert run([part("gpus", leaves())], tmp_path)["gpus"].verdict == PASSED


def test_with_few_minutes_the_first_are_done(tmp_path):
    slow = "import time; time.sleep(0.5)"
    parts = [part(name, leaves(before=slow), least_s=60) for name in ("one", "two", "three")]
    outcomes = run(parts, tmp_path, 125)
    # Each took less than its share, and what it left is still not enough for the third; then it is.
    assert [o.verdict for o in outcomes.values()] == [PASSED, PASSED, PASSED]
    outcomes = run([part(name, leaves(), least_s=60) for name in ("a", "b")], tmp_path, 59)
    assert {o.verdict for o in outcomes.values()} == {UNJUDGED} and "takes 60 s" in outcomes["a"].why


def test_an_optional_step_is_begun_only_if_there_is_time(tmp_path, monkeypatch):
    """Of 1000 s, which pass on a clock that a step sets."""
    passed = tmp_path / "passed"
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + float(passed.read_text() if passed.exists() else 0), sleep=time.sleep
    )
    for module in runner, child:
        monkeypatch.setattr(module, "time", clock)

    def part_of(name: str, seconds: int) -> Part:
        takes = f"import pathlib; pathlib.Path({str(passed)!r}).write_text('{seconds}')"
        return part(name, leaves(before=takes), Step("again", python(""), optional=True))

    outcome = run([part_of("two", 600)], tmp_path, 1000)["two"]
    assert outcome.verdict == PASSED and len(outcome.commands) == 1, "as long as the first there is not"
    passed.unlink()
    outcome = run([part_of("both", 400)], tmp_path, 1000)["both"]
    assert len(outcome.commands) == 2
    made = [Step("make", python("exit(1)"), unless=tmp_path)]
    assert len(run([part("made", leaves(), *made)], tmp_path, 1000)["made"].commands) == 1


def test_an_interrupt_ends_the_part_and_leaves_the_rest(tmp_path):
    ask = iter([False, False, False])
    asked = []

    def asked_to_end() -> bool:
        asked.append(next(ask, True))
        return asked[-1]

    slow = part("slow", "import time; time.sleep(600)")
    outcomes = run([slow, part("next", leaves())], tmp_path, asked_to_end=asked_to_end)
    assert outcomes["slow"].why == "only was interrupted"
    assert outcomes["next"].why == "interrupted before it began"
    assert not (tmp_path / "slow" / runner.OUTCOME).exists()


def test_a_command_ends_with_who_runs_it(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import sys
from pathlib import Path
from sglang_pd_radix.tools.thorough import child
sleeper = "import os, time; open({f"{pid}.new"!r}, 'w').write(str(os.getpid()));"
sleeper += "os.rename({f"{pid}.new"!r}, {str(pid)!r}); time.sleep(600)"
child.run([sys.executable, "-c", sleeper], {{}}, Path({str(tmp_path / "log")!r}), 600)
"""
    owner = subprocess.Popen(python(code), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    deadline = time.monotonic() + 60
    while not pid.exists():
        assert time.monotonic() < deadline and owner.poll() is None
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    while psutil.pid_exists(int(pid.read_text())):
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.05)


def test_parts_of_another_setting_are_not_mixed_in(tmp_path):
    state = tmp_path / "parts"
    runner.open_state(state, {"model": "a", "GPUs": ["x"]})
    runner.open_state(state, {"model": "a", "GPUs": ["x"]})
    with pytest.raises(PdRadixError, match=r"model was a, and is b\): give another --report, or remove it"):
        runner.open_state(state, {"model": "b", "GPUs": ["x"]})
    with pytest.raises(PdRadixError, match="holds other files"):
        runner.open_state(tmp_path, {"model": "a"})
    (state / runner.SETTING).write_text("{")
    with pytest.raises(PdRadixError, match="remove"):
        runner.open_state(state, {})


# ---- the report


def test_the_word_over_all():
    assert overall([PASSED, PASSED, SKIPPED]) == PASSED
    assert overall([PASSED, UNJUDGED]) == UNJUDGED == overall([SKIPPED]) == overall([])
    assert overall([PASSED, FAILED, UNJUDGED]) == FAILED


def a_report(**outcomes: Outcome) -> report.Document:
    return report.Document(
        "pd-radix verify --thorough",
        "2026-11-24",
        {name: f"what {name} shows" for name in (*outcomes, "later")},
        outcomes,
        {"Machine": {"GPU 0": "NVIDIA H100, driver 580"}, "Versions": {"torch": "2.9"}},
        ["ok    python  3.11"],
    )


SVG = '<svg xmlns="http://www.w3.org/2000/svg"><text>a curve</text></svg>'


@pytest.mark.parametrize("form", report.FORMS.values(), ids=report.FORMS)
def test_the_report_says_all_and_needs_nothing_else(form):
    whole = Outcome(
        PASSED,
        lines=["20 of 20 <answers>"],
        tables=[Table("By turn", ["turn", "a|b"], [["1", "x"]])],
        pictures=[Picture("A curve", SVG)],
        commands=["pd-radix demo"],
        seconds=61.4,
    )
    wrong = Outcome(FAILED, "chat ended with exit status -9", tail=["Killed & gone"])
    page = form(a_report(whole=whole, wrong=wrong, lacking=Outcome(SKIPPED, "it takes two GPUs")))
    for text in (
        *("FAILED: 1 of the 3 parts that this host can show passed, 1 failed, 1 could not be judged, 1 skipped"),
        *("NVIDIA H100, driver 580", "2.9", "ok    python  3.11", "what whole shows", "pd-radix demo", "By turn"),
        *("chat ended with exit status -9", "it takes two GPUs", "not yet begun", "61", "The end of its log:"),
    ):
        assert text in page, text
    assert "data:image/svg+xml;base64," in page
    # Nothing is fetched, and nothing is code.
    assert not re.search(r"<script|<link|(src|href)=(?!['\"]?data:)", page) and "http" not in page
    if page.startswith("<!doctype"):
        assert "&lt;answers&gt;" in page and "<answers>" not in page and "Killed &amp; gone" in page
    else:
        assert "a\\|b" in page


def test_an_outcome_is_kept_as_it_is():
    outcome = Outcome(PASSED, "why", ["a"], [Table("t", ["h"], [["c"]])], [Picture("p", SVG)], commands=["x"])
    assert Outcome.of(json.loads(json.dumps(outcome.document()))).document() == json.loads(
        json.dumps(outcome.document())
    )


def test_secrets_and_paths_are_not_in_the_report():
    words = ["verify", "--model", "/home/me/model", "--api-key", "s3cret", "--admin-api-key=s3cret", "--x=/a/b"]
    assert runner.hidden(words) == ["verify", "--model", "model", "--api-key", "...", "--admin-api-key=...", "--x=b"]
    step = Step(
        "chat", [sys.executable, "-m", "sglang_pd_radix.tools.cli", "demo", "--json", "/p/mla/chat/x", *words[3:5]]
    )
    assert runner.as_typed(step, Path("/p/mla")) == "pd-radix demo --json mla/chat/x --api-key ..."


# ---- the command


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--minutes", "3"], "--minutes is for --thorough"),
        (["--only", "mla"], "--only is for --thorough"),
        (["--thorough", "--minutes", "0"], "not a number of minutes above 0"),
        (["--thorough", "--minutes", "soon"], "not a number of minutes above 0"),
        (["--thorough", "--only", "mla,x"], "x is not one of exactness"),
        (["--thorough", "--report", "r.pdf"], "does not end in .html or .md"),
        (["--thorough", "--report", "nowhere/r.md"], "there is no directory"),
        (["--thorough", "--self-test"], "leave out --thorough"),
        (["--thorough", "--log-dir", "x"], "beside the report"),
        (["--thorough", "--seed", "2"], "have their own"),
    ],
)
def test_bad_usage(arguments, why, capsys):
    assert cli.main(["verify", *arguments]) == 2
    assert why in capsys.readouterr().err


def fake_parts(monkeypatch, *fakes: Part) -> None:
    monkeypatch.setattr(command.parts, "parts", lambda setting, names: fakes)
    monkeypatch.setattr(command.doctor, "diagnose", lambda: [Check("device", "ok", "CPU", "")])


def test_the_command_from_options_to_exit_code(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "r.md", tmp_path / "r.json"
    arguments = ["verify", "--thorough", "--minutes", "1", "--report", str(file), "--json", str(out)]
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        fake_parts(monkeypatch, part("one", leaves()), part("two", leaves(), needs="a GPU"))
        assert cli.main(arguments) == 0
        assert "PASSED: 1 of the 1 parts that this host can show passed, 1 skipped" in capsys.readouterr().out
        assert json.loads(out.read_text())["passed"] and "ok    device" in file.read_text()
        fake_parts(monkeypatch, part("one", leaves()), part("two", leaves('{"verdict": "FAILED"}')))
        assert cli.main(arguments) == 1
        assert "one: PASSED, from an earlier run" in capsys.readouterr().err
        fake_parts(monkeypatch, part("late", leaves(), least_s=100))
        assert cli.main(arguments) == 1, "what could not be judged is not passed"
        fake_parts(
            monkeypatch,
            part(
                "ends", f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM)" + "\nimport time; time.sleep(60)"
            ),
        )
        assert cli.main(arguments) == 128 + signal.SIGTERM
        assert "only was interrupted" in file.read_text()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_the_gpus_that_workers_would_see():
    rows = [["0", "H100", "81559"], ["1", "H100", "81559"]]
    assert [gpu.index for gpu in host.visible_gpus(rows, {})] == ["0", "1"]
    assert [gpu.index for gpu in host.visible_gpus(rows, {"CUDA_VISIBLE_DEVICES": "1"})] == ["1"]
    assert [gpu.index for gpu in host.visible_gpus(rows, {"CUDA_VISIBLE_DEVICES": "GPU-8a"})] == ["GPU-8a"]
    assert host.visible_gpus(rows, {"CUDA_VISIBLE_DEVICES": ""}) == () == host.visible_gpus([], {})
    assert host.Host(False, host.visible_gpus(rows, {})).large and not host.Host(True).large
