"""What commands tell of their progress: a line for each step, on stderr."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest

from sglang_pd_radix.tools.cluster import Progress
from sglang_pd_radix.tools.progress import Display, print_ready

READY = Progress(SimpleNamespace(name="decode-0"), "ready", 12.34)  # type: ignore[arg-type]
LOADING = Progress(SimpleNamespace(name="decode-0"), "loading [weights] :key:", 3.0)  # type: ignore[arg-type]
OF_ALL = Progress(None, "serving at http://127.0.0.1:1", 13.0)


def test_there_is_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    show = Display()
    show.done("(a) [bold]shared[/] prefixes :key: " + "x" * 200)
    show.now("run 1 of 2")
    show.startup(LOADING)
    assert capsys.readouterr() == (
        "",
        f"(a) [bold]shared[/] prefixes :key: {'x' * 200}\n  run 1 of 2\n[  3.0 s] decode-0: loading [weights] :key:\n",
    )


def test_lines_may_be_stamped(capsys: pytest.CaptureFixture[str]) -> None:
    show = Display(stamped=True)
    show.now("making the model")
    assert re.fullmatch(r"\[ {0,4}\d+ s\]   making the model\n", capsys.readouterr().err)


def test_only_what_is_ready_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (LOADING, READY, OF_ALL):
        print_ready(progress)
    assert capsys.readouterr() == (
        "[ 12.3 s] decode-0: ready\n[ 13.0 s] cluster: serving at http://127.0.0.1:1\n",
        "",
    )


@pytest.mark.parametrize("gone", ["a reader", "a disk", "a terminal"])
def test_what_cannot_be_written_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], gone: str
) -> None:
    """A reader that is gone (``2> >(head -1)``), a full disk, a lost terminal: what goes to stdout is still wanted."""
    if gone == "a disk":
        write = os.open("/dev/full", os.O_WRONLY)
    else:
        read, write = os.pipe() if gone == "a reader" else os.openpty()
        os.close(read)
    with open(write, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        show = Display()
        show.startup(READY)
        show.now("making the model")
        print("the result", flush=True)
        # Nor does what comes after it on stderr.
        print("pd-radix: an error", file=sys.stderr, flush=True)
    assert capfd.readouterr().out == "the result\n"
