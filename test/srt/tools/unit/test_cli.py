"""``pd-radix`` itself: its help, its options, and what a wrong invocation says."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from sglang_pd_radix.tools import cli, reference


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["doctr"], "pd-radix: there is no command doctr: did you mean doctor? see pd-radix --help"),
        (["wxyz"], "pd-radix: there is no command wxyz; see pd-radix --help"),
        (["doctor", "--jsn"], "pd-radix doctor: unknown argument --jsn: did you mean --json? see pd-radix doctor"),
        (["patches", "x"], "pd-radix patches: unknown argument x; see pd-radix patches --help"),
        (["top", "--gatway=h:1"], "unknown argument --gatway: did you mean --gateway?"),
        (["demo", "--page-size", "64"], "unknown argument --page-size (options of the engine go behind --);"),
        (["verify", "--port", "1"], "--port (options of the engine go behind --);"),
        (["drain", "h:1"], "pd-radix drain: the following arguments are required: --gateway;"),
        (["verify", "--backend", "tcp"], "pd-radix verify: argument --backend: invalid choice: 'tcp'"),
        (["--no-such-option"], "pd-radix: the following arguments are required: COMMAND;"),
    ],
)
def test_a_wrong_invocation_is_one_line_with_the_way_out(capsys, words, says) -> None:
    began = time.monotonic()
    assert cli.main(words) == 2
    assert time.monotonic() - began < 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert says in line and out == "" and line.startswith("pd-radix") and line.endswith("--help")


def test_help_has_the_commands_in_groups(capsys) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["evaluate", "operate", "develop", "options"]
    assert re.findall(r"^  ([a-z][a-z-]+) ", text, re.MULTILINE) == [*cli.COMMANDS]
    # Without a command it is bad usage all the same: a script may have meant one.
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", text)


def test_help_needs_no_engine() -> None:
    program = """
import contextlib, io, sys
from sglang_pd_radix.tools import cli
with contextlib.redirect_stdout(io.StringIO()) as shown:
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0, command
assert shown.getvalue().count("usage: pd-radix ") == len(cli.COMMANDS)
print(sorted({"sglang", "torch", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done


def test_the_same_thing_has_the_same_name_everywhere() -> None:
    options = {command: reference.option_names(command) for command in cli.COMMANDS}
    assert {command for command, names in options.items() if "--model" in names} == {"demo", "verify", "bench", "up"}
    folders = {command for command, names in options.items() if "--work-dir" in names}
    assert folders == {"demo", "verify", "bench", "up"}
    assert {command for command, names in options.items() if "--log-dir" in names} < folders
    parser = cli.build_parser("verify")
    read = [parser.parse_args(["verify", name, "x"]).log_dir for name in ("--work-dir", "--log-dir")]
    assert [str(path) for path in read] == ["x", "x"]


@pytest.mark.parametrize("command", ["verify", "bench", "demo", "top", "trace"])
def test_options_of_a_large_command_are_in_groups(capsys, command) -> None:
    assert cli.main([command, "--help"]) == 0
    headings = re.findall(r"^(\w[\w -]+):$", capsys.readouterr().out, re.MULTILINE)
    assert len(headings) >= 3, headings
