"""The command: options, order of the runs, and output."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pd_radix import __version__
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.arguments import hidden
from sglang_pd_radix.tools.cluster import Progress, add_router_option, named_gateway
from sglang_pd_radix.tools.make_model import ModelShape, make_model
from sglang_pd_radix.tools.progress import Display
from sglang_pd_radix.tools.up import check_may_switch, check_model, check_page_size

from . import breakdown, goodput, record, report
from .deploy import AGGREGATED, OFF, POLICY, Deployment, Shape, Side, engine_options, pool_of_ordinary
from .measure import LoadGenerator
from .rates import parse_rates
from .turns import measure_all
from .workload import KINDS, Agents, Sizes, Tokens, Trace, Workload, apply_settings

RUNS, QUICK_RUNS = 5, 2
# The default report directory, and the files that identify a report.
OUT, REPORTS = "bench-report", ("report.json", "goodput.json")
# A quick run leaves out the workload whose conversations outgrow its pool.
QUICK_KEYS = ("a", "aw", "b", "c", "d", "e", "f", "g", "h", "i", "j")
QUICK: dict[str, dict[str, Any]] = {
    "a": {"prefixes": 6, "requests": 80, "answer": 64, "concurrency": 38, "rounds": 2},
    "aw": {"prefixes": 4, "requests": 48, "answer": 96},
    "b": {"prefixes": 12, "per_group": 4, "answer": 16, "concurrency": 32},
    "c": {"clients": 4, "turns": 4, "answer": 16},
    "d": {"herds": 2, "size": 8, "answer": 8},
    "e": {"requests": 32, "concurrency": 8, "answer": 16},
    "f": {"requests": 30},
    "g": {"prefixes": 5, "requests": 56, "answer": 64, "concurrency": 28, "rounds": 2},
    "h": {"prefixes": 14, "requests": 70, "answer": 64, "concurrency": 42},
    "i": {"clients": 4, "turns": 3, "answer": 16, "others": 2, "prompt": 1000},
    "j": {"clients": 4, "turns": 3, "answer": 16},
    "k": {"clients": 4, "turns": 12},
}
# A quick run uses one deployment: a start takes most of a minute on two cores.
QUICK_SHAPE = {"pool": 13824, "reserve": 192}
PAGE_SIZE = 16
# The default model. On a CPU attention takes time in proportion to the KV of all requests. With the default shape of
# `pd-radix make-model` that is nearly all of a decode step (0.35 s for 30 requests on two cores with the engine's loop
# over them): a batch of any size then yields the same tokens per second, and more requests at once gain nothing. This
# model has one layer and 256 bytes of KV per token instead of 16 KiB.
SHAPE = ModelShape(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=128)

_EPILOG = """
Workloads:
  a   shared prefixes, decode short of memory,      e   no sharing: the overhead
      from a cold start (aw: warm, a few at once)   f   a trace
  b   many small groups, long answers               g   churn: new prefixes come to a pool full of old ones
  c   multi-turn chat                               h   more prefixes than fit at once, in random order
  d   a herd of requests with the same new prefix   i   chat behind long prompts of others
                                                    j   chat with short and long turns by turns
                                                    k   agents: long first prompts, 40 turns, more than fit

  pd-radix bench --quick
  pd-radix bench --only aw --set aw.concurrency=128 --set aw.pool=65536 --work-dir report
  pd-radix bench --only f --trace conversation_trace.jsonl --set f.shrink=32
  pd-radix bench --only g,h --compare "other:SGLANG_DISAGGREGATION_DECODE_FREE_WATERMARK=0 --max-running-requests 64"
  pd-radix bench --only c,i,j --aggregated --breakdown --compare "sent:--disaggregation-decode-local-prefill off"
  pd-radix bench --model Qwen/Qwen3-0.6B -- --page-size 64
  pd-radix bench --only a,e,g --aggregated --runs 2
  pd-radix bench --only a --slo ttft=2000,itl=60 --aggregated

Engine options for all workers follow after --.
The sides take turns, in every other run the other way round. Answers that are not the same are asked for again.
Exit code: 0 the KV pools are sound and answers are the same with the cache off and on, 1 otherwise. In float32 they may
part where two tokens are as likely, to 1e-4 nats; in other types rounding parts them, and they are only counted (with
--slo not compared). How high a rate is kept fails nothing: too few requests to find it, or a load generator that was
late, are notes of the report.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix bench``."""
    parser.description = (
        "Measure PD serving with the decode prefix cache off and on: same prefill worker, same requests, in turns."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_workloads(parser.add_argument_group("what is asked"))
    _add_deployment(parser.add_argument_group("what is deployed"))
    figures = parser.add_argument_group("what is told")
    figures.add_argument(
        "--breakdown",
        action="store_true",
        help="also the stages of TTFT, p50 and p99, from the workers' time stamps (slows each step of all sides a "
        "little)",
    )
    figures.add_argument(
        "--work-dir",
        dest="out",
        type=Path,
        metavar="DIR",
        help="directory for the report (Markdown), report.json and record.json; it must have no report yet "
        "(default: bench-report, or bench-report-2 and so on)",
    )
    _add_slo_arguments(parser.add_argument_group("rates that keep a target"))
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")


def _add_workloads(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--quick", action="store_true", help="small sizes and 2 runs of each side: minutes in all")
    group.add_argument("--only", metavar="KEYS", help=f"workloads, comma-separated, of {', '.join(KINDS)}")
    group.add_argument("--runs", type=int, metavar="N", help=f"runs of each side (default: {RUNS})")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY.SIZE=VALUE", help="another size; --sizes lists them"
    )
    group.add_argument("--sizes", action="store_true", help="print every workload's sizes and end")
    group.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake-format trace for f, and for lengths of k")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another seed asks other tokens")


def _add_deployment(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="MODEL", help="model directory or Hugging Face name (default: a made one)")
    group.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl", help="KV transfer (default: nixl)")
    add_router_option(group)
    group.add_argument(
        "--on",
        default="",
        metavar="OPTIONS",
        help="engine options, in quotes (--on='--x y'), for the side with the flag alone; VARIABLE=value before them "
        "sets its environment",
    )
    group.add_argument(
        "--prefill",
        default="",
        metavar="OPTIONS",
        help="engine options, in quotes, for all sides' prefill worker",
    )
    group.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="NAME:OPTIONS",
        help="add a side with the flag and these OPTIONS (as for --on); repeatable",
    )
    group.add_argument(
        "--aggregated",
        action="store_true",
        help="add a side of ordinary servers, as many as a pair has workers, with the same total KV pool, behind a "
        "cache_aware router",
    )


def _add_slo_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        metavar="ttft=MS,itl=MS",
        help="send requests at fixed rates; find the highest rate at which 90%% and 99%% of them keep both limits, "
        "for each side and for the flag with both limits as targets",
    )
    group.add_argument(
        "--slo-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="duration of one rate with --slo; at least 8 times the TTFT (default: 30)",
    )
    group.add_argument(
        "--slo-rates",
        metavar="SIDE=RATE,...",
        help="with --slo, measure these sides at these requests/s, in this order, instead of searching (hours where "
        "steps are slow): off=0.9,target=1.9,off=0.8",
    )


def chosen_sizes(args: argparse.Namespace) -> dict[str, Sizes]:
    """The chosen workloads' sizes by key. Raises PdRadixError."""
    keys = args.only.split(",") if args.only else list(QUICK_KEYS if args.quick else KINDS)
    sizes = {}
    for key in keys:
        if key not in KINDS:
            raise PdRadixError(f"--only {args.only}: {key or 'an empty name'} is not one of {', '.join(KINDS)}")
        sizes[key] = KINDS[key]()
        for name, value in ({**QUICK.get(key, {}), **QUICK_SHAPE} if args.quick else {}).items():
            setattr(sizes[key], name, value)
        traced = sizes[key]
        if args.trace and isinstance(traced, (Trace, Agents)):
            traced.file = str(args.trace)
    if args.trace and not any(isinstance(entry, (Trace, Agents)) for entry in sizes.values()):
        raise PdRadixError("--trace is for the workloads f and k: add one to --only")
    apply_settings(sizes, args.set)
    return sizes


def chosen_sides(args: argparse.Namespace) -> list[Side]:
    """The sides: off, on, and those of ``--compare``. Raises PdRadixError."""
    sides = [OFF, Side.parse("on", args.on)]
    for given in args.compare:
        name, colon, text = given.partition(":")
        if not colon or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise PdRadixError(f"--compare {given}: write NAME:OPTIONS, NAME of small letters, digits and -")
        if name in [side.name for side in sides] or name in ("least", "possible", "target", AGGREGATED.name):
            raise PdRadixError(f"--compare {given}: {name} is the name of something else, take another")
        sides.append(Side.parse(name, text))
    if args.slo:
        sides.append(goodput.Slo.parse(args.slo).side)
    return [*sides, AGGREGATED] if args.aggregated else sides


def _plan(args: argparse.Namespace, sides: Sequence[Side]) -> goodput.Plan:
    """The plan from ``--slo`` and its options. Raises PdRadixError."""
    rates = parse_rates(args.slo_rates, [side.name for side in sides]) if args.slo_rates else []
    return goodput.Plan(goodput.Slo.parse(args.slo), args.slo_seconds, rates)


def _check_slo(args: argparse.Namespace, sides: Sequence[Side]) -> None:
    """Raises PdRadixError for invalid or contradicting options."""
    if args.slo_rates and not args.slo:
        raise PdRadixError("--slo-rates goes with --slo")
    if not 0 < args.slo_seconds <= goodput.DAY_S:
        raise PdRadixError(f"--slo-seconds {args.slo_seconds:g}: must be above 0 seconds, and a day at most")
    if args.slo and args.breakdown:
        raise PdRadixError("--slo goes without --breakdown")
    if args.slo:
        _plan(args, sides)


def shape_of(sizes: Sizes) -> Shape:
    """A workload's deployment."""
    return Shape(sizes.pool, sizes.reserve, sizes.prefill)


def _has_report(out: Path) -> bool:
    return any((out / name).exists() for name in REPORTS)


def _new_directory() -> Path:
    """A default report directory, made here."""
    names = itertools.chain([OUT], (f"{OUT}-{number}" for number in itertools.count(2)))
    while True:
        path = Path(next(names))
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def run(args: argparse.Namespace) -> int:
    """Measure and write the report. Returns the exit code."""
    runs = args.runs if args.runs is not None else QUICK_RUNS if args.quick else RUNS
    if runs < 1:
        raise PdRadixError(f"--runs {runs}: must be at least 1")
    sizes, sides = chosen_sizes(args), chosen_sides(args)
    _check_slo(args, sides)
    check_page_size(args.engine_options)
    if args.sizes:
        for key, entry in sizes.items():
            print(f"{key:<3}" + "  ".join(f"{name}={value}" for name, value in vars(entry).items()))
        return 0
    check_may_switch("the benchmark", args.engine_options)
    model = check_model(args.model) if args.model else None
    if args.out and _has_report(args.out):
        raise PdRadixError(f"--work-dir {args.out}: there is a report; give another directory, or remove it")
    try:
        args.out = args.out or _new_directory()
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdRadixError(f"--work-dir {args.out or OUT}: {error.strerror or error}") from error
    options = engine_options(args.engine_options, PAGE_SIZE, made_model=not args.model)
    started = time.monotonic()
    document: dict[str, Any] = {"workloads": []}
    show = Display(stamped=True)
    with tempfile.TemporaryDirectory(prefix="pd-radix-bench-") as scratch:
        if model is None:
            show.now("making the model")
            model = str(make_model(Path(scratch) / "model", SHAPE))
        load = LoadGenerator(model, args.out / "logs" / "load.log", args.breakdown)
        try:
            _all(args, sizes, sides, runs, model, options, load, document, show)
        except BaseException:
            if document["workloads"]:  # what is complete is worth keeping
                with process_group.ends_held_back():
                    _finish(document, args, runs, started)
            raise
        finally:
            load.close()
        text = _finish(document, args, runs, started)
    print(text)
    print(args.out)
    return 1 if any(entry["problems"] for entry in document["workloads"]) else 0


def _all(
    args: argparse.Namespace,
    sizes: dict[str, Sizes],
    sides: Sequence[Side],
    runs: int,
    model: str,
    options: Sequence[str],
    load: LoadGenerator,
    document: dict[str, Any],
    show: Display,
) -> None:
    shapes: dict[Shape, list[str]] = {}
    for key, entry in sizes.items():
        shapes.setdefault(shape_of(entry), []).append(key)
    for number, (shape, keys) in enumerate(shapes.items()):

        def progress(step: Progress) -> None:
            show.now(f"starting: {step}")

        logs = args.out / "logs" / f"deployment-{number}"
        began = time.monotonic()
        made = Deployment(
            model,
            shape,
            options,
            args.backend,
            logs,
            progress,
            sides=sides,
            gateway=named_gateway(args.router),
            prefill_options=shlex.split(args.prefill),
            env=breakdown.ENV if args.breakdown else {},
        )
        with made as deployment:
            show.now("waiting for the load generator")
            load.wait_ready()
            info = deployment.info(deployment.variants[0])
            document.setdefault("setting", {"device": str(info["device"]), "dtype": str(info["dtype"])})
            page_size = info["page_size"]  # Some attention backends have their own, whatever was asked for.
            document["setting"] |= {"page_size": page_size, "model": _name_of(args.model)}
            show.now(f"{_serving(shape, sides)} after {time.monotonic() - began:.0f} s")
            tokens = Tokens(load.words, args.seed)
            for key in keys:
                workload = sizes[key].make(key, tokens)
                _check_fits(key, workload, shape)
                exact = document["setting"]["dtype"].endswith("float32")
                if args.slo:
                    plan, keep = _plan(args, sides), document["workloads"].append
                    found = goodput.measure(deployment, load, workload, plan, tokens, page_size, show, exact, keep=keep)
                    found["notes"] = [*found.get("notes", ()), *_of_aggregated(shape, sides)]
                    keep(found)
                    if found["interrupted"]:
                        return
                    continue
                measured = measure_all(deployment, load, workload, runs, page_size, show, exact)
                measured["shape"] = vars(shape)
                measured["sides"] = {side.name: _shown(side) for side in sides}
                measured["notes"] = [*measured.get("notes", ()), *_of_aggregated(shape, sides)]
                document["workloads"].append(measured)


def _serving(shape: Shape, sides: Sequence[Side]) -> str:
    decode = sum(not side.aggregated for side in sides)
    ordinary = " and 2 ordinary servers" if AGGREGATED in sides else ""
    return f"1 prefill and {decode} decode workers (pool of each: {shape.pool} tokens){ordinary} serve"


def _of_aggregated(shape: Shape, sides: Sequence[Side]) -> list[str]:
    """The report's note on aggregated servers, if that side is there."""
    if AGGREGATED not in sides:
        return []
    return [
        f"{AGGREGATED.name}: 2 ordinary servers with {pool_of_ordinary(shape)} tokens of KV each, as "
        f"many workers and tokens as a pair has, behind a router with {POLICY}. They send no KV; their CPU "
        "time is compared with that of prefill and decode together."
    ]


def _check_fits(key: str, workload: Workload, shape: Shape) -> None:
    """Raises PdRadixError for a request that does not fit on a decode worker."""
    if workload.longest > shape.pool:
        raise PdRadixError(
            f"workload {key} has a request of {workload.longest} tokens, and decode's pool holds "
            f"{shape.pool}: --set {key}.pool="
        )


def _finish(document: dict[str, Any], args: argparse.Namespace, runs: int, started: float) -> str:
    """Write the report. Returns it as text."""

    def version(*names: str) -> str:
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return ""

    backend = ("nixl",) if args.backend == "nixl" else ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    document["setting"] |= {
        "command": shlex.join(["pd-radix", *hidden(sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "runs": runs,
        "machine": f"{len(os.sched_getaffinity(0))} cores {platform.machine()}, {memory:.0f} GiB",
        "backend": args.backend,
        "backend_version": version(*backend),
        "sglang": version("sglang"),
        "sglang_pd_radix": __version__,
        "torch": version("torch"),
        "router": named_gateway(args.router).version,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - started, 1),
    }
    text, name = (goodput.markdown(document), "goodput") if args.slo else (report.markdown(document), "report")
    report.write(document, text, args.out, name)
    if not args.slo:
        record.write(document, args.out)
    return text


def _shown(side: Side) -> dict[str, Any]:
    """The report's entry of ``side``."""
    env = hidden([f"{name}={value}" for name, value in side.env])
    return {"options": hidden(side.options), "env": dict(assignment.split("=", 1) for assignment in env)}


def _name_of(model: str | None) -> str:
    """The model's name in a report: of a path, only its last part."""
    if model is None:
        return "pd-radix make-model"
    return Path(model).name if Path(model).is_dir() else model
