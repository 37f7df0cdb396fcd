"""What commands tell of their progress: line for line where stderr is a file, rows on a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_pd_radix.tools.cluster import Progress
from sglang_pd_radix.tools.progress import Display, print_ready

READY = Progress(SimpleNamespace(name="decode-0"), "ready", 12.34)  # type: ignore[arg-type]
LOADING = Progress(SimpleNamespace(name="decode-0"), "loading [weights] :key:", 3.0)  # type: ignore[arg-type]
OF_ALL = Progress(None, "serving at http://127.0.0.1:1", 13.0)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stderr counts as a terminal of 100 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def visible(text: str) -> str:
    """``text`` without what moves the cursor or colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_there_is_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as show:
        show.now("flag off: [bold]turn[/] 1 of 2 :key: " + "x" * 200)
        show.done("flag off: serving after 3 s")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "  flag off: [bold]turn[/] 1 of 2 :key: " + "x" * 200 + "\nflag off: serving after 3 s\n"


def test_lines_of_several_parts_are_stamped_and_indented(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(2, stamped=True) as show:
        show.now("making the model")
        show.begin("(a) shared prefixes", 10)
        show.step("(a) run 1 of 1, on", 5, "5/10")
        show.done("(a) run 1 of 1, on: 5 req/s")
        show.end()
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\[ *\d+ s\] ", "", line) for line in lines] == [
        "  making the model",
        "(a) shared prefixes",
        "  (a) run 1 of 1, on: 5 req/s",
    ]
    assert all(re.match(r"\[ {0,4}\d+ s\] ", line) for line in lines)


def test_a_start_is_told_process_by_process(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as show:
        for progress in (LOADING, READY, OF_ALL):
            show.startup(progress)
    assert capsys.readouterr().err.splitlines() == [
        "[  3.0 s] decode-0: loading [weights] :key:",
        "[ 12.3 s] decode-0: ready",
        "[ 13.0 s] cluster: serving at http://127.0.0.1:1",
    ]


def test_only_what_is_ready_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (LOADING, READY, OF_ALL):
        print_ready(progress)
    assert capsys.readouterr() == (
        "[ 12.3 s] decode-0: ready\n[ 13.0 s] cluster: serving at http://127.0.0.1:1\n",
        "",
    )


def test_on_a_terminal_processes_have_rows_that_go_again(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as show:
        show.startup(LOADING)
        show._rows.refresh()
        show.startup(READY)
        show._rows.refresh()
    out, err = capsys.readouterr()
    seen = visible(err)
    assert out == "" and "\x1b[" in err
    assert "loading [weights] :key:" in seen
    assert re.search(r"ok +decode-0 .*ready", seen), seen
    assert len(show._rows.tasks) == 1
    assert "━" not in seen, "nothing is counted"


def test_on_a_terminal_the_steps_stay_as_in_a_pipe(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as show:
        for progress in (LOADING, READY):
            show.startup(progress)
            shown = capsys.readouterr().err
            assert f"{progress}\n" in visible(shown).replace("\r", "")


def test_a_process_that_is_ready_when_it_is_first_told_of_is_ok(
    terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display() as show:
        show.startup(READY)
        show._rows.refresh()
    assert re.search(r"ok +decode-0 .*ready", visible(capsys.readouterr().err))


def test_on_a_terminal_parts_have_bars_and_what_is_done_stays(
    terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(2, stamped=True) as show:
        show.begin("(a) shared prefixes", 10)
        show.step("(a) run 1", 5, "5/10")
        show._rows.refresh()
        show.done("(a) run 1: 5 req/s")
        show.end()
        show._rows.refresh()
    seen = visible(capsys.readouterr().err)
    assert re.search(r"workloads +\S+ +1/2", seen) and re.search(r"\(a\) run 1 +\S+ +5/10", seen), seen
    assert re.search(r"s\]   \(a\) run 1: 5 req/s", seen)


def test_on_a_terminal_a_long_text_is_cut(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as show:
        show.now("y" * 300)
        show._rows.refresh()
        show.done("z" * 300)
    seen = visible(capsys.readouterr().err)
    assert "y" * 60 in seen and "y" * 61 not in seen
    assert "z" * 300 in seen.replace("\r", "").replace("\n", "")


def test_a_reader_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As of ``2> >(head -1)``: what goes to stdout is still wanted."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Display(2, stamped=True) as show:
            show.now("making the model")
            show.done("(a) run 1 of 1, on: 5 req/s")
            show.begin("(b) groups", 3)
        print("the result", flush=True)
        # Nor does what comes after it on stderr.
        print("pd-radix: an error", file=sys.stderr, flush=True)
    assert capfd.readouterr().out == "the result\n"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stderr goes to one."""
    stderr = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - that it cannot be closed in order is the case
    monkeypatch.setattr(sys, "stderr", stderr)
    yield
    with contextlib.suppress(OSError):
        stderr.close()


def test_a_full_disk_ends_nothing(full_disk: None) -> None:
    with Display() as show:
        show.startup(READY)
        show.now("making the model")
        show.done("(a) run 1 of 1, on: 5 req/s")


def test_a_row_that_could_not_be_drawn_is_one_row(terminal: None, full_disk: None) -> None:
    """Each step added one more, and what rich would draw of all."""
    with Display(2) as show:
        assert show._rows is not None
        for i in range(5):
            show.step("(a) off", i, "")
        assert len(show._rows.tasks) <= 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of rich, which draws the rows
def test_a_terminal_that_is_gone_ends_nothing(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    stderr = open(theirs, "w", buffering=1)  # noqa: SIM115 - as above
    monkeypatch.setattr(sys, "stderr", stderr)
    with Display(2) as show:
        show.begin("(a) shared prefixes", 10)
        os.close(ours)
        # A new row is drawn at once.
        show.startup(LOADING)
        show.done("(a) run 1: 5 req/s")
        show.end()
    with contextlib.suppress(OSError):
        stderr.close()
