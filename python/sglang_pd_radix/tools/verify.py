"""``pd-radix verify``: checks the decode prefix cache on this machine with this model, with a verdict for a report.

A prefill worker, and decode workers without and with the flag. Both get the same prompts: new, repeated, extended, cut
off within a page, a herd with one new prefix, chats. Prefill recomputes every answer in one pass: each token's
log-probability, and the KV that decode had at the end, are compared with its own. The rounding allowed is measured on
the side without the flag, and has a ceiling.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from . import doctor
from .arguments import add_log_dir
from .bench import command, deploy, measure
from .cluster import add_router_option, named_gateway, option_value
from .make_model import make_model
from .progress import Display
from .up import (
    check_json,
    check_log_dir,
    check_may_switch,
    check_model,
    check_page_size,
    write_json,
)
from .verification import kv_record
from .verification.asking import ANSWER_TOKENS
from .verification.check import Check
from .verification.judging import Part, Verdict
from .verification.script import Script, tokens_to_hold

_BACKENDS = ("nixl", "mooncake")

# Part of decode's pools that the prompts may fill; the rest is for waiting requests and the reserve.
FILLED = 0.7

_EPILOG = """
Engine options for all workers follow after --. Three workers run: on one GPU each needs a third of it, for example

  pd-radix verify --model Qwen/Qwen3-0.6B -- --page-size 64 --mem-fraction-static 0.25

Exit code: 0 the verdict is PASSED, 1 it is not, 2 bad usage, 128 and its number where a
signal has ended it (130 for Ctrl-C).
"""


# ------------------------------------------------------------------------------------------------------------ command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix verify``."""
    parser.description = "Check the decode prefix cache on this machine, with your model: a verdict for a report."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    checked = parser.add_argument_group("what is checked")
    checked.add_argument("--model", metavar="MODEL", help="model directory or Hugging Face name (default: a made one)")
    checked.add_argument("--backend", choices=_BACKENDS, default="nixl", help="KV transfer (default: nixl)")
    add_router_option(checked)
    checked.add_argument("--seed", type=int, default=0, metavar="N", help="another seed asks other tokens")
    written = parser.add_argument_group("what is written")
    written.add_argument("--json", type=Path, metavar="FILE", help="write the verdict and its figures there")
    add_log_dir(written)
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the verdict. Returns the exit code."""
    check_json(args.json)
    check_may_switch("verify", args.engine_options)
    check_page_size(args.engine_options)
    check_log_dir(args.log_dir)
    given = check_model(args.model) if args.model else None
    verdict = Verdict(_versions() | {"router": named_gateway(args.router).version})
    unused = {*_BACKENDS} - {args.backend}
    interrupted = False
    show = Display()
    with (
        tempfile.TemporaryDirectory(prefix="pd-radix-verify-") as scratch,
        _log_dir(args.log_dir, verdict, show) as logs,
    ):
        checks = [check for check in doctor.diagnose() if check.name not in unused]
        _tell_doctor(checks, args.backend, verdict)
        try:
            model = given or str(make_model(Path(scratch) / "model"))
            _verify(args, model, logs, Path(scratch) / "records", verdict, show)
        except PdRadixError as error:
            if not verdict.setting.get("model"):
                raise
            # The report includes findings so far.
            verdict.part("the run").failures.append(str(error))
        except KeyboardInterrupt:
            if not verdict.setting.get("model"):
                raise
            interrupted = True
            verdict.part("the run").unknown.append("it was interrupted before it was done")
    try:
        if args.json:
            write_json(args.json, verdict.document())
    finally:  # The terminal may be closed or the disk full.
        print(verdict.text)
    if interrupted:
        return 128 + signal.SIGINT
    return 0 if verdict.word == "PASSED" else 1


def _tell_doctor(checks: Sequence[doctor.Check], backend: str, verdict: Verdict) -> None:
    """Report failed and missing checks; of the latter the run needs the loader and ``backend``."""
    unwell = [check for check in checks if check.status == "fail"]
    unchecked = [check for check in checks if check.status == "warn" and check.detail.startswith("not checked")]
    told = ", ".join(check.name for check in unwell) or "nothing is wrong"
    told += f"; not checked: {', '.join(check.name for check in unchecked)}" if unchecked else ""
    part = verdict.part("doctor")
    part.lines.append(told)
    part.failures += [f"doctor: {check.name}: {check.detail}. {check.way_out}" for check in unwell]
    needed = [check for check in unchecked if check.name in ("loader", backend)]
    part.unknown += [f"doctor: {check.name}: {check.detail}: {check.way_out}" for check in needed]


@contextlib.contextmanager
def _log_dir(given: Path | None, verdict: Verdict, show: Display) -> Iterator[Path]:
    """``given``; otherwise a temporary directory, kept only after an error or a FAILED verdict.

    An interrupt counts as neither.
    """
    if given is not None:
        yield given
        return
    path = Path(tempfile.mkdtemp(prefix="pd-radix-verify-logs-"))
    wanted = False
    try:
        yield path
        wanted = verdict.word == "FAILED"
    except Exception:
        wanted = True
        raise
    finally:
        if not wanted or not any(path.iterdir()):
            shutil.rmtree(path, ignore_errors=True)
        else:
            show.done(f"logs are in {path}")


def _verify(args: argparse.Namespace, model: str, logs: Path, records: Path, verdict: Verdict, show: Display) -> None:
    options = deploy.engine_options(args.engine_options, command.PAGE_SIZE, made_model=not args.model)
    shape = deploy.Shape(max(command.QUICK_SHAPE["pool"], _pool(options)), command.QUICK_SHAPE["reserve"])

    with contextlib.ExitStack() as stack:
        load = stack.enter_context(contextlib.closing(measure.LoadGenerator(model, logs / "load.log")))
        deployment, written = _deployment(args, model, logs, records, shape, options, show)
        show.now("starting a prefill and two decode workers")
        stack.enter_context(deployment)
        # Before the servers are stopped: a dead worker is a better reason than its failed request.
        stack.push(lambda kind, error, trace: deployment.cluster.check() if kind is PdRadixError else None)
        info = deployment.info(deployment.variants[1])
        verdict.setting |= _setting(args, info)
        load.wait_ready()
        bigrams = bool(info.get("speculative_algorithm"))
        script = Script(load.words, info["page_size"], args.seed, bigrams)
        check = Check(deployment, script, info, *written)
        _judge_answers(check, verdict, show)
        verdict.part("pools").lines.append(_pools_told(deployment.counts_pages))


def _pools_told(counts_pages: dict[str, bool]) -> str:
    """The report's text on sound pools. counts_pages: as in `deploy.Deployment`."""
    whole, partly = (
        ", ".join(name for name, told in counts_pages.items() if told is wanted) for wanted in (True, False)
    )
    rest = (
        f"; {partly} does not report its pages (several kinds of KV, or host memory), so only rows and buffers were "
        "looked at there"
    )
    return f"after each part every page was free or in the tree, and no lock was left, on {whole or 'no worker'}" + (
        rest if partly else ""
    )


def _pool(options: list[str]) -> int:
    """Tokens of decode's pools that hold all prompts without eviction: all of them are repeated."""
    try:
        page_size = int(option_value(options, "--page-size") or 1)
    except ValueError:
        page_size = 1  # the engine will report the error
    return int(tokens_to_hold(page_size, ANSWER_TOKENS) / FILLED) // page_size * page_size


def _deployment(
    args: argparse.Namespace,
    model: str,
    logs: Path,
    records: Path,
    shape: deploy.Shape,
    options: list[str],
    show: Display,
) -> tuple[deploy.Deployment, list[kv_record.Records]]:
    """The servers, not yet started, and the record directories of prefill, and of decode without and with the flag."""
    written = [kv_record.Records(records / name) for name in ("prefill", "off", "on")]
    prefill, off, on = (kv_record.environment(each.directory, dict(os.environ)) for each in written)
    deployment = deploy.Deployment(
        model,
        shape,
        options,
        args.backend,
        logs,
        lambda step: show.now(f"starting: {step}"),
        sides=(deploy.Side("off", False, env=tuple(off.items())), deploy.Side("on", env=tuple(on.items()))),
        prefill_env=prefill,
        gateway=named_gateway(args.router),
    )
    return deployment, written


def _setting(args: argparse.Namespace, info: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": args.model or "pd-radix make-model",
        "device": info["device"],
        "dtype": info["dtype"],
        "attention": info["attention_backend"],
        "transfer": args.backend,
        "page size": info["page_size"],
        "tp": info["tp_size"],
        "overlap": "off" if info["disable_overlap_schedule"] else "on",
    }


def _judge_answers(check: Check, verdict: Verdict, show: Display) -> None:
    """Check answers, KV and leaks of both sides; see `Check`."""
    show.now("flag off: one request at a time, many at once, and all of it scored")
    problems = check.measure_noise()
    check.noise.judge_noise(verdict)
    if check.unreadable:
        without = f"not compared, only answers are: there is no record of a {check.unreadable}"
        verdict.table["KV"] = Part([without], left_out=True)
    check.empty_on()
    runs = {}
    for name, what in (("cold cache", "nothing"), ("warm cache", "everything")):
        show.now(f"flag on, {what} in the caches")
        runs[name] = check.ask_on()
    problems += check.problems_on()
    show.now("flag on: all of it scored")
    check.judge_on(verdict, runs)
    verdict.part("pools").failures += problems


def _versions() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for name in ("sglang", "sglang-pd-radix", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
