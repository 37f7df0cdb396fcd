"""The first minutes on a GPU host: every side over chats, shared prefixes and agents, in one go, and one page of it.

    python benchmark/gpu_minutes.py
    python benchmark/gpu_minutes.py --model /models/Qwen3-8B --other-env /opt/sglang-0.5.23 -- --attention-backend fa3

Sides: off, on, local prefill the other way than by default (``local``: forced, ``sent``: off), aggregated. With
``--other-env`` also a pair of another release of SGLang from that virtual environment, without the patch set: ``other``
with ``--other-options``, ``other-off`` without them.

Each workload has its part of the time, and the most wanted come first. page.md and runs.json are written after each
run, itl.svg after all of the same servers. What there was no time for is listed. Without a GPU all sizes are those of
`pd-radix bench --quick`. Exit code: 0, or 1 where something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.tools.arguments import hidden
from sglang_pd_radix.tools.bench import chart, command, compared, report, workload
from sglang_pd_radix.tools.bench.deploy import AGGREGATED, OFF, ON, Deployment, Shape, Side, Variant, engine_options
from sglang_pd_radix.tools.bench.measure import LoadGenerator, run_once
from sglang_pd_radix.tools.bench.turns import WARM_UP_REQUESTS
from sglang_pd_radix.tools.cluster import RADIX_FLAG, compared_on, gpu_count, option_value, with_defaults
from sglang_pd_radix.tools.make_model import ModelShape, make_model
from sglang_pd_radix.tools.progress import Display
from sglang_pd_radix.tools.up import check_may_switch, check_model, check_page_size, write_whole

# The model of the half hours on an H100: 0.94 billion parameters, for GPUs of at least so many MiB.
MADE, MADE_MIB = ModelShape(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=128, intermediate=6144), 24000
LOCAL, SENT = (
    Side(name, True, ("--disaggregation-decode-local-prefill", value))
    for name, value in (("local", "128"), ("sent", "off"))
)
# What keeps the patch set out of another environment: that of a checkout comes by a path, that of a package by a .pth.
UNPATCHED = {"PYTHONPATH": "", "SGLANG_PD_RADIX": "0"}
# Of the time, for ending the last servers and the page, seconds.
LAST_S = 10.0
# Of a GPU's memory, for all workers on it; what one takes beside weights and KV (context, graphs, activations), MiB.
USABLE, WORKER_MIB = 0.8, 4000
PACKAGES = "sglang sglang-kernel sgl-kernel torch triton flashinfer-python nixl nixl-cu12 nixl-cu13 smg".split()
VERSIONS = """import importlib.metadata as m, platform, sys
there = {d.metadata["Name"]: d.version for d in m.distributions()}
print(", ".join(["Python " + platform.python_version(), *(f"{n} {there[n]}" for n in sys.argv[1:] if n in there)]))"""
WORST = ("requests_per_s", "ttft_p50_s", "ttft_p99_s", "itl_mean_s", "itl_p99_s")


class TimeUp(PdRadixError):
    """The time of a set of servers is over."""


# --------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Step:
    """A workload. seconds: about what a run takes. level: requests at a time; 0 of a chat, which has as many as
    clients."""

    key: str
    seconds: float
    sizes: workload.Sizes
    level: int = 0

    @property
    def name(self) -> str:
        return f"({self.key})" + f" at {self.level}" * bool(self.level)


# Servers that are started together, and the interpreter of their workers if it is that of another environment.
Servers = tuple[Sequence[Side], str]


def steps(small: bool) -> tuple[Shape, list[Step]]:
    """The pools, and what is measured, the most wanted first. small: as `pd-radix bench --quick`."""
    shape = Shape(13824, 192) if small else Shape(45056, 64)
    pools: dict[str, Any] = vars(shape)
    chat = command.QUICK["c"] if small else dict(clients=20, turns=8, document=1000, question=100, answer=64)
    agents = {**command.QUICK["k"], "pause": 0.25} if small else dict(clients=16, turns=20)
    main, *levels = (32, 8, 2, 16) if small else (128, 32, 8, 64, 16)

    def prefixes(level: int) -> Step:
        requests = 5 * level if level == main else 80 if small else 320
        more = {**(command.QUICK["a"] if small else {}), **pools, "requests": requests, "concurrency": level}
        return Step("a", 12, workload.SharedPrefixes(**{**more, "rounds": 1}), level)

    of_chat, of_agents = workload.Chat(**{**chat, **pools}), workload.Agents(**{**agents, **pools})
    return shape, [Step("c", 8, of_chat), prefixes(main), Step("k", 25, of_agents), *map(prefixes, levels)]


def part_until(now: float, end: float, weights: Sequence[float]) -> float:
    """When the first of the parts is over that share the time until ``end``; what one leaves goes to those after it."""
    return now + max(0.0, end - now) * weights[0] / sum(weights)


def step_until(now: float, end: float, needs: Sequence[float], least: float) -> float:
    """When the first of the steps is over, which share the time until ``end`` with as many of the next as fit into it.

    needs: seconds that each takes. least: of the first, without which it is not begun; then it is ``now``.
    """
    if end - now < least:
        return now
    return part_until(now, end, needs[: max(1, sum(total <= end - now for total in itertools.accumulate(needs)))])


def shares_gpu(options: Sequence[str], gpus: int) -> bool:
    """Whether decode workers are where prefill is."""
    return gpus > 0 and option_value(compared_on(options, [[]], gpus)[0], "--base-gpu-id") in (None, "0")


def own(shared: bool) -> list[Side]:
    """The sides of this environment. shared: decode is on prefill's GPU, where local prefill is off by default."""
    return [OFF, ON, LOCAL if shared else SENT, AGGREGATED]


def others(options: str) -> list[Side]:
    """Those of a second environment. options: its flag; "" if it has none."""
    env, flag = tuple(UNPATCHED.items()), tuple(shlex.split(options))
    return [*([Side("other", False, flag, env)] if flag else []), Side("other-off", False, (), env)]


def at_once(sides: Sequence[Side], executable: str, shared: bool, room: float) -> tuple[list[Servers], list[str]]:
    """``sides`` in sets of as many as there is memory for, and those left out. room: how many workers fit on a GPU."""
    pairs, ordinary = [s for s in sides if not s.aggregated], [s for s in sides if s.aggregated]
    most = max(1, int(min(room, len(sides) + shared)) - shared)
    found = [pairs[i : i + most] for i in range(0, len(pairs), most)]
    if len(found[-1]) + shared + len(ordinary) * (1 + shared) <= room:
        found[-1], ordinary = [*found[-1], *ordinary], []
    return [(part, executable) for part in found], [f"{side.name}: not enough GPU memory" for side in ordinary]


def worker_mib(model: Path, pool: int) -> float:
    """About what a worker takes of a GPU: weights in two bytes, KV of ``pool`` tokens, and the rest."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    weights = float(sum(path.stat().st_size for path in model.glob("*.safetensors")))
    config |= config.get("text_config", {})
    weights /= 2 if config.get("dtype", config.get("torch_dtype")) == "float32" else 1
    heads = config.get("num_attention_heads", 1)
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    kv = 4 * pool * config.get("num_hidden_layers", 0) * config.get("num_key_value_heads", heads) * size
    return (weights + kv) / 2**20 + WORKER_MIB


# --------------------------------------------------------------------------------------------------------------- host


def gpus_told() -> list[str]:
    """Name, driver and memory of each GPU, as nvidia-smi says them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    return []


def memory_mib(told: Sequence[str]) -> float:
    """Of the smallest GPU; infinity where it is not said."""
    found = [line.rpartition(",")[2].split()[0] for line in told if line.strip()]
    return min((float(word) for word in found if word.isdecimal()), default=math.inf)


def versions(python: str = sys.executable, **env: str) -> str:
    """Releases in an environment. Raises PdRadixError if that has no SGLang."""
    asked = [python, "-c", VERSIONS, *PACKAGES]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PdRadixError(f"{python} does not run: {error}") from error
    if ", sglang " not in done.stdout:
        raise PdRadixError(f"{python} has no sglang {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------------ measure


@dataclass
class Minutes:
    """Everything that is measured until ``end`` (of time.monotonic); ``args.out`` has what was found after each run.

    doing: what is under way. until: when the servers that run have to end. answers: of each step, those of the side
    that was asked first.
    """

    args: argparse.Namespace
    model: str
    options: Sequence[str]
    setting: dict[str, Any]
    end: float
    show: Display
    left_out: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    answers: dict[str, tuple[str, list[str]]] = field(default_factory=dict, repr=False)
    began: float = field(default_factory=time.monotonic)
    doing: str = ""
    until: float = math.inf

    def measure(self, sets: Sequence[Servers], shape: Shape, wanted: Sequence[Step]) -> None:
        """All sets, one after the other. One of which nothing was measured is halved: an option may not be known."""
        left, number = [*sets], 0
        while left:
            self.until = part_until(time.monotonic(), self.end, [1 + len(sides) for sides, _ in left])
            (sides, executable), known = left.pop(0), len(self.rows)
            names, number = ", ".join(side.name for side in sides), number + 1
            try:
                self._measure((sides, executable), shape, wanted, number)
            except TimeUp:
                self.left_out.append(f"{names}: their time was over; lost and what comes after it: {self.doing}")
            except Exception as error:  # Another release may answer anything, and others are to have their time.
                self._failed(names, error)
                half = (len(sides) + 1) // 2
                if len(self.rows) == known and len(sides) > 1:
                    parts = [part for part in (sides[:half], sides[half:]) if not part[0].aggregated]
                    left[:0] = [(part, executable) for part in parts]
            finally:
                self.write()
                if not (picture := curve(self.rows, self.setting)).empty:
                    write_whole(self.args.out / "itl.svg", picture.picture())

    def _check_time(self) -> None:
        if time.monotonic() > self.until:
            raise TimeUp("the time is over")

    def _measure(self, servers: Servers, shape: Shape, wanted: Sequence[Step], number: int) -> None:
        sides, executable = servers
        logs, began = self.args.out / "logs", time.monotonic()
        load = LoadGenerator(self.model, logs / f"load-{number}.log")
        try:
            with Deployment(
                self.model,
                shape,
                self.options,
                self.args.backend,
                logs / f"servers-{number}",
                lambda step: self._now(f"starting: {step}"),
                sides,
                prefill_env=UNPATCHED if executable else {},
                executable=executable,
                on_wait=self._check_time,
            ) as deployment:
                load.wait_ready()
                processes = deployment.cluster.processes
                self.show.done(f"{len(processes)} servers serve after {time.monotonic() - began:.0f} s")
                self.commands += [f"{number} {p.name}: {shlex.join(hidden(p.command))}" for p in processes]
                info = deployment.info(deployment.variants[0])
                self.setting |= {key: info[key] for key in ("device", "dtype", "page_size") if key in info}
                self.setting.setdefault("starts, s", []).append(round(time.monotonic() - began))
                pace, of = 1.0, deployment.variants
                for i in range(len(wanted)):
                    # Whoever is compared first of all comes first, in turns.
                    turns = [*reversed(of[:2]), *reversed(of[2:])] if i % 2 else of
                    pace = self._ask(deployment, load, wanted[i:], turns, pace)
        finally:
            load.close()

    def _ask(
        self, deployment: Deployment, load: LoadGenerator, wanted: Sequence[Step], turns: Sequence[Variant], pace: float
    ) -> float:
        """The first step of ``wanted``, one side after the other, while there is time for as long as one has taken.
        Returns how many times as long that is as the step says; pace: how many it was before."""
        step = wanted[0]
        asked = step.sizes.make(step.key, workload.Tokens(load.words, 0))
        page_size, longest, begun, late = self.setting["page_size"], 0.0, time.monotonic(), []
        for variant in turns:
            began, name = time.monotonic(), f"{step.name}, {variant.name}"
            one = [pace * s.seconds for s in wanted]
            until = step_until(begun, self.until, [len(turns) * seconds for seconds in one], len(turns[:2]) * one[0])
            if began + longest >= until:
                late.append(variant.name)
                continue
            self._now(name)
            try:
                # What is compiled or set up for the first prompts of a size is not measured.
                run_once(deployment, load, asked.beginning(WARM_UP_REQUESTS), variant, 0, page_size)
                run = run_once(deployment, load, asked, variant, 1, page_size)
            except TimeUp:
                raise
            except Exception as error:
                self._failed(name, error)
                deployment.check()
                continue
            longest = max(longest, time.monotonic() - began)
            pace = longest / step.seconds
            self.failures += [f"{name}: {problem}" for problem in run.problems]
            first, texts = self.answers.setdefault(step.name, (variant.name, run.texts))
            row = {"variant": variant.name, "radix": variant.radix, "step": step.name, "level": step.level}
            row |= {"title": asked.title, "chat": asked.chat, "requests": asked.requests, "first": first}
            row["different"] = report.compare_answers([texts, run.texts])[1]
            self.rows.append(row | {"figures": run.figures})
            self.show.done(f"{name}: {run.figures['requests_per_s']:.2f} requests/s")
            self.write()
        self.left_out += [f"{step.name}: no time for {', '.join(late)}"] * bool(late)
        return pace

    def _failed(self, what: str, error: Exception) -> None:
        self.failures.append(f"{what}: {error if isinstance(error, PdRadixError) else repr(error)}")

    def _now(self, doing: str) -> None:
        self.doing = doing
        self.show.now(doing)

    def write(self) -> None:
        """Write what there is."""
        self.setting["seconds"] = round(time.monotonic() - self.began)
        lower_bounds(self.rows)
        told = {name: getattr(self, name) for name in ("setting", "rows", "failures", "left_out", "commands")}
        write_whole(self.args.out / "runs.json", report.as_json(told))
        write_whole(self.args.out / "page.md", page(told))


# --------------------------------------------------------------------------------------------------------------- page


def lower_bounds(rows: Sequence[dict[str, Any]]) -> None:
    """Add the KV sent over the lower bound. How many bytes a page has, the runs of off say, which sends all pages."""
    off = [row["figures"] for row in rows if row["variant"] == OFF.name]
    page_bytes = off[0]["sent_bytes"] / off[0]["prompt_pages"] if off else math.nan
    for figures in (row["figures"] for row in rows):
        figures["sent_over_least"] = figures["sent_bytes"] / page_bytes / figures["least_pages"]


def by_level(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of each side its runs with a level, in their order."""
    found: dict[str, list[dict[str, Any]]] = {row["variant"]: [] for row in rows}
    for row in sorted((row for row in rows if row["level"]), key=lambda row: row["level"]):
        found[row["variant"]].append(row)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each run."""
    entry = {"runs": rows, "chat": bool(rows) and rows[0]["chat"], "variants": [row["variant"] for row in rows]}
    return report.markdown_table(*compared.table(entry)) if rows else ""


def curve(rows: Sequence[dict[str, Any]], setting: dict[str, Any]) -> chart.Chart:
    lines = [
        chart.Line(
            name, color, [(f["requests_per_s"], 1e3 * f["itl_mean_s"]) for f in (run["figures"] for run in runs)]
        )
        for color, (name, runs) in zip(chart.COLORS, by_level(rows).items(), strict=False)
    ]
    note = f"(a), a point for each number of requests at a time; {setting.get('model')}; {setting.get('host')}"
    return chart.Chart("ITL and requests/s", "requests answered per second", "ITL mean, ms", lines, note=note)


def worst_pairs(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of each figure the least favourable ratio of a side with the flag over off."""
    off = {row["step"]: row["figures"] for row in rows if row["variant"] == OFF.name}
    flagged = [row for row in rows if row["radix"] and row["step"] in off]
    for figure in (figure for figure in report.FIGURES if figure.key in WORST):
        ratios = [(row["figures"][figure.key] / off[row["step"]][figure.key], row) for row in flagged]
        known = [one for one in ratios if not math.isnan(one[0])]
        if known:
            ratio, row = (min if figure.good == "more" else max)(known, key=lambda one: one[0])
            yield f"{figure.name.partition(', ')[0]}: {ratio:.2f} times off's, {row['variant']} in {row['step']}"


def page(told: dict[str, Any]) -> str:
    """The result, as Markdown. Of an error with the end of a log the first line; runs.json has all."""
    setting, rows = told["setting"], told["rows"]
    parts = ["# First minutes on a GPU host", f"    {setting['command']}"]
    parts.append("\n".join(f"* {name}: {value}" for name, value in setting.items() if name != "command"))
    parts.append(
        "A run is measured once, and those of other servers (see the end) are further apart in time. –: not known. The "
        "patch set counts the KV sent, so nobody does in the second environment."
    )
    sides, most = list(dict.fromkeys(row["variant"] for row in rows)), max((row["level"] for row in rows), default=0)
    for step in dict.fromkeys(row["step"] for row in rows if row["level"] in (0, most)):
        of = sorted((row for row in rows if row["step"] == step), key=lambda row: sides.index(row["variant"]))
        parts += [f"## {step}: {of[0]['title']}", table(of)]
        different = ", ".join(f"{row['variant']} {row['different']}" for row in of if row["variant"] != row["first"])
        parts.append(f"Of {of[0]['requests']} answers, not those of {of[0]['first']}: {different or 'not compared'}.")
    levels = [{**run, "variant": f"{name}, {run['level']}"} for name, runs in by_level(rows).items() for run in runs]
    parts += ["## ITL against requests/s, by requests at a time", table(levels), "![ITL](itl.svg)"]
    ends = {"The worst pair": worst_pairs(rows), "Failed": told["failures"], "Not run": told["left_out"]}
    for title, texts in ends.items():
        parts += [f"## {title}", "\n".join(f"* {text.splitlines()[0]}" for text in texts) or "Nothing."]
    return "\n\n".join([*parts, "## Servers", "\n".join(f"    {line}" for line in told["commands"])]) + "\n"


# ------------------------------------------------------------------------------------------------------------ command


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="model directory (default: a made one that fits)")
    parser.add_argument("--other-env", type=Path, metavar="DIR", help="virtual environment with another SGLang")
    parser.add_argument(
        "--other-options", default=RADIX_FLAG, metavar="OPTIONS", help="its decode worker's (default: its own flag)"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of everything (default: 15)")
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl", help="KV transfer (default: nixl)")
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), metavar="DIR", help="default: first-gpu")
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raise PdRadixError for what would fail after minutes."""
    check_page_size(args.engine_options)
    check_may_switch("this", args.engine_options)
    chart.check_libraries()
    if not 0 < args.minutes < math.inf:
        raise PdRadixError(f"--minutes {args.minutes:g}: must be above 0")
    if args.model and not Path(check_model(args.model)).is_dir():
        raise PdRadixError(f"--model {args.model}: give a directory")
    if (args.out / "page.md").exists():
        raise PdRadixError(f"--out {args.out}: there is a page; give another directory, or remove it")


def run(args: argparse.Namespace) -> int:
    """Measure. Returns the exit code."""
    began = time.monotonic()
    check(args)
    small, told = cpu_host.active(), gpus_told()
    gpus, memory = 0 if small else gpu_count(), memory_mib(told)
    second = {"second environment": versions(str(args.other_env / "bin/python"), **UNPATCHED)} if args.other_env else {}
    options = engine_options(args.engine_options, command.PAGE_SIZE, made_model=not args.model)
    if gpus:  # With pools of a told size and nearly all the memory, all start together.
        options = with_defaults(options, {"--mem-fraction-static": "0.85"})
    shared, (shape, wanted) = shares_gpu(options, gpus), steps(small)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    setting = {
        "command": shlex.join(["python", "benchmark/gpu_minutes.py", *hidden(sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "host": f"{len(os.sched_getaffinity(0))} cores {platform.machine()}, {ram:.0f} GiB",
        "GPUs": "; ".join(told) or "none",
        "decode": "on prefill's GPU" if shared else "on other GPUs than prefill" if gpus else "on the CPU",
        "software": versions(),
        **second,
        "model": Path(args.model).name if args.model else "pd-radix make-model",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    show = Display(stamped=True)
    with tempfile.TemporaryDirectory(prefix="pd-radix-gpu-") as scratch:
        show.now("making the model")
        made = command.SHAPE if small or memory < MADE_MIB else MADE
        model = args.model or str(make_model(Path(scratch) / "model", made))
        room = USABLE * memory / worker_mib(Path(model), shape.prefill_pool) if gpus else math.inf
        sets, left_out = at_once(own(shared), "", shared, room)
        if args.other_env:
            python = str(args.other_env / "bin" / "python")
            sets += at_once(others(args.other_options), python, shared, room)[0]
        end = began + 60 * args.minutes - LAST_S
        all_of_it = Minutes(args, model, options, setting, end, show, left_out, began=began)
        all_of_it.measure(sets, shape, wanted)
    print(args.out / "page.md")
    return 1 if all_of_it.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse(argv))
    except PdRadixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
