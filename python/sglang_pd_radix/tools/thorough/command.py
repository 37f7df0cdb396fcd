"""The options, and the order in which all of it is done."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_pd_radix import __version__
from sglang_pd_radix.tools import doctor
from sglang_pd_radix.tools.bench.chart import check_libraries
from sglang_pd_radix.tools.up import check_json, check_may_switch, check_model, check_page_size, write_whole

from .. import process_group
from . import child, facts, host, parts, report, runner
from .outcome import PASSED, Outcome
from .setting import Setting

MINUTES, REPORT = 30.0, Path("pd-radix-report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``--thorough``."""
    group = parser.add_argument_group("thorough")
    group.add_argument(
        "--thorough", action="store_true", help="everything that this host can show, in the order of worth, in a report"
    )
    group.add_argument(
        "--minutes",
        type=minutes,
        metavar="N",
        help=f"how long, at most (default: {MINUTES:g}); the first parts first, and a part that is stopped may take "
        f"{child.GRACE_S:.0f} s longer to write what it has found",
    )
    group.add_argument(
        "--report",
        type=report_file,
        metavar="FILE",
        help=f".html or .md (default: {REPORT}); beside it, what is finished: run again, it goes on from there",
    )
    group.add_argument(
        "--only", type=part_names, metavar="PARTS", help=f"comma-separated, of {', '.join(parts.NAMES)} (default: all)"
    )


def minutes(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def report_file(text: str) -> Path:
    """A file that can be written, of a kind that there is."""
    path = Path(text)
    if path.suffix not in report.FORMS:
        raise argparse.ArgumentTypeError(f"{text} does not end in {' or '.join(report.FORMS)}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.absolute().parent}")
    return path


def part_names(text: str) -> tuple[str, ...]:
    """Names of parts."""
    names = tuple(text.split(","))
    wrong = [name for name in names if name not in parts.NAMES]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0] or 'an empty name'} is not one of {', '.join(parts.NAMES)}")
    return names


def misused(args: argparse.Namespace) -> str:
    """What does not go together, "" if all does."""
    if not args.thorough:
        given = [f"--{name}" for name in ("minutes", "report", "only") if getattr(args, name) is not None]
        return f"{given[0]} is for --thorough" if given else ""
    if args.self_test:
        return "--self-test is a check of its own: leave out --thorough"
    if args.log_dir:
        return "--work-dir: with --thorough, logs are in the directory beside the report"
    if args.json and args.json.absolute() == (args.report or REPORT).absolute():
        return f"--json and --report are both {args.json}"
    return "--seed: the parts of --thorough have their own" if args.seed else ""


def run(args: argparse.Namespace) -> int:
    """Do all parts and write the report after each. Returns the exit code: 0 if all passed that this host can show."""
    check_json(args.json)
    check_may_switch("verify", args.engine_options)
    check_page_size(args.engine_options)
    check_libraries()
    if args.model:
        check_model(args.model)
    file = args.report or REPORT
    directory = file.with_suffix(".parts")
    checks = doctor.diagnose()
    here = host.look(checks)
    setting = Setting(
        here, directory.absolute() / "models", args.model, args.backend, args.router, tuple(args.engine_options)
    )
    chosen = parts.parts(setting, args.only or parts.NAMES)
    with runner.alone(directory):
        runner.open_state(directory, _found_with(setting))
        return _run(args, file, directory, setting, chosen, checks)


def _run(
    args: argparse.Namespace,
    file: Path,
    directory: Path,
    setting: Setting,
    chosen: Sequence[runner.Part],
    checks: Sequence[doctor.Check],
) -> int:
    signals: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    process_group.on_end(note)
    told = _document(setting, chosen, checks)

    def known(outcomes: Mapping[str, Outcome]) -> None:
        _write(file, args.json, told, outcomes)

    known(runner.earlier(chosen, directory))
    outcomes = runner.run_all(
        chosen, directory.absolute(), 60 * (args.minutes or MINUTES), known, _say, lambda: bool(signals)
    )
    document = report.Document(**told, outcomes=outcomes)
    with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone; the report is written
        print(report.text(document))
        print(f"{file}: the report; {directory}: logs, and what is finished", flush=True)
    if signals:
        return 128 + signals[0]
    return 0 if document.verdict == PASSED else 1


def _found_with(setting: Setting) -> dict[str, Any]:
    """By what parts of two runs are comparable.

    The options are kept without what is nobody's business, and compared by a digest of all that they are; so are the
    environment and the model.
    """
    versions = facts.versions(setting.host, setting.router)
    return {
        "model": setting.model or "made models",
        "backend": setting.backend,
        "router": setting.router or "default",
        "engine options": runner.hidden(setting.engine_options),
        "digest of the engine options": facts.digest(setting.engine_options),
        "digest of the environment": facts.environment(os.environ),
        "digest of the model": facts.model(setting.model),
        "sglang-pd-radix": __version__,
        **{f"version of {name}": version for name, version in versions.items()},
        "driver": sorted({driver for (driver,) in host.ask_driver("driver_version")}) or "none",
        "GPUs": [gpu.name for gpu in setting.host.gpus] or "none",
    }


def _document(setting: Setting, chosen: Sequence[runner.Part], checks: Sequence[doctor.Check]) -> dict[str, Any]:
    """All of the report but the outcomes."""
    given = shlex.join(runner.hidden(setting.engine_options)) or "none"
    return {
        "command": shlex.join(["pd-radix", *runner.hidden(sys.argv[1:])]),
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "titles": {part.name: part.title for part in chosen},
        "facts": {
            "Machine": facts.machine(setting.host),
            "Versions": facts.versions(setting.host, setting.router),
            "Options": {
                "model": Path(setting.model).name if setting.model else "made ones",
                "transfer": setting.backend,
                "engine options": given,
            },
        },
        "doctor": [
            line
            for check in checks
            for line in (f"{check.status:<4}  {check.name:<8}  {check.detail}", f"{'':16}-> {check.way_out}")
            if not line.endswith("-> ")
        ],
    }


def _write(file: Path, json_file: Path | None, told: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
    document = report.Document(**told, outcomes=dict(outcomes))
    files = {file: report.FORMS[file.suffix](document)}
    if json_file:
        content = {**asdict(document), "verdict": document.verdict, "passed": document.verdict == PASSED}
        files[json_file] = json.dumps(content, indent=1) + "\n"
    for path, content_of in files.items():
        write_whole(path, content_of)


def _say(text: str) -> None:
    # Where nobody is there to be told, what is to be done is done all the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"pd-radix: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
