"""Goodput: the requests per second that a side takes with enough of them within a promised TTFT and ITL.

Requests come by a clock and wait for nobody, so what a side cannot take shows as waiting: by chance, evenly spread over
time (Poisson), or at a trace's own times, drawn out or together to the rate. Of each side the greatest rate is looked
for at which 90%, and 99%, of requests keep both promises: doubled until they do not, then by bisection. The sides take
turns from rate to rate.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.up import write_whole

from . import parted
from .asked import RequestFailed
from .chart import Chart, Line
from .deploy import Deployment, Side
from .measure import LoadGenerator, Run, run_once
from .rates import (
    LATE,
    LEAST_RATE,
    LEAST_REQUESTS_OF,
    MOST_RATE,
    PRECISION,
    SHARES,
    Search,
    Trial,
    measure_given,
    search_all,
)
from .report import as_json, caption
from .workload import Request, Tokens, Workload

if TYPE_CHECKING:
    from .turns import Show

#: Requests of one measurement at least: fewer say nothing of 99%, and little of 90%.
LEAST_REQUESTS = 20
#: Times the promised TTFT that requests of a measurement come, at least: at a rate that is by `PRECISION` too high, who
#: comes after t seconds waits (PRECISION - 1) t, and that costs a tenth of them the TTFT after 7.4 times as long only.
LASTING = 8.0
#: By which size a workload gets more requests, where that is not ``requests``.
SIZE_OF_REQUESTS = {"b": "prefixes", "d": "herds"}
ITL_OPTION, TTFT_OPTION = "--disaggregation-decode-itl-target", "--disaggregation-decode-ttft-target"
#: What the options are set to, as a part of what is promised: clients see 4 to 8% more than decode's steps, and more
#: until the first token than decode's queue and what comes after it.
TARGET_PART = 0.9
RATES_GIVEN = "the rates were given: of a side that keeps its greatest, a greater one was not tried"
NOT_COMPARED = "answers are not compared: in this type rounding parts them (in float32 they are)"
#: The longest time that may be given, seconds.
DAY_S = 86400.0
COLORS = {"off": "#d97706", "on": "#2563eb", "target": "#059669"}
MORE_COLORS = ("#9333ea", "#db2777", "#6b7280")


@dataclass(frozen=True)
class Slo:
    """What is promised of a request: seconds until its first token, and mean seconds between two of the others."""

    ttft_s: float
    itl_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Of ``ttft=MS,itl=MS``. Raises PdRadixError."""
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                given[name.strip()] = float(value)
            except ValueError:
                raise PdRadixError(f"--slo {text}: {part} is not ttft=MS or itl=MS") from None
        if given.keys() != {"ttft", "itl"} or not all(0 < ms / 1000 <= DAY_S for ms in given.values()):
            raise PdRadixError(
                f"--slo {text}: give both, as in ttft=500,itl=30, in milliseconds above 0, and a day at most"
            )
        return cls(given["ttft"] / 1000, given["itl"] / 1000)

    def kept(self, ttft_s: float, itl_s: float) -> bool:
        return ttft_s <= self.ttft_s and itl_s <= self.itl_s

    @property
    def side(self) -> Side:
        """The side that goes by both promises itself."""
        itl_ms, ttft_ms = (f"{1000 * TARGET_PART * promised:g}" for promised in (self.itl_s, self.ttft_s))
        return Side("target", True, (ITL_OPTION, itl_ms, TTFT_OPTION, ttft_ms))

    def __str__(self) -> str:
        return f"TTFT {1000 * self.ttft_s:g} ms, ITL {1000 * self.itl_s:g} ms"


@dataclass(frozen=True)
class Plan:
    """What is to be measured of a workload.

    seconds: of one measurement, which is longer where `lasting_s` is. rates: of sides, per second, to be measured in
    this order in place of a search.
    """

    slo: Slo
    seconds: float
    rates: Sequence[tuple[str, float]] = ()


def open_loop(workload: Workload, rate: float, seconds: float, tokens: Tokens) -> Workload:
    """Requests of ``workload`` that come at ``rate`` per second for about ``seconds``, and wait for no answer.

    At the times that they have, drawn out or together; where they have none, by chance, which is the same for all
    sides and, but for the pace, at all rates. Raises PdRadixError for a chat, whose prompts follow from its answers.
    """
    if workload.chat:
        raise PdRadixError(f"--slo: {workload.key} is a chat, in which a question waits for the answer before it")
    requests = [request for asked in workload.rounds for request in asked]
    requests = requests[: max(LEAST_REQUESTS, math.ceil(rate * seconds))]
    due = [request.arrival_s for request in requests]
    if any(at is None for at in due):
        chance, at = tokens.order(f"{workload.key}/arrivals"), 0.0
        times = []
        for _ in requests:
            times.append(at)
            at += chance.expovariate(1.0)
    else:
        times = [float(at or 0.0) for at in due]
    # At the mean rate, exactly: or it would be another by chance for few requests.
    pace = (len(times) - 1) / (times[-1] - times[0]) / rate if len(times) > 1 and times[-1] > times[0] else 0.0
    timed = [
        dataclasses.replace(request, arrival_s=pace * (at - times[0]))
        for request, at in zip(requests, times, strict=True)
    ]
    warm: list[Request] = [request for asked in workload.warm for request in asked]
    return dataclasses.replace(workload, rounds=[timed], warm=[warm] if warm else [], concurrency=None, stream=False)


def lasting_s(slo: Slo) -> float:
    """How long requests have to come, seconds, before a queue that only grows has cost them the promised TTFT."""
    return LASTING * slo.ttft_s


def most_rate(workload: Workload, slo: Slo) -> float:
    """The greatest rate, per second, at which ``workload`` has requests for as long as `lasting_s`."""
    return min(MOST_RATE, (workload.requests - 1) / lasting_s(slo))


def too_few(workload: Workload, slo: Slo, searches: Mapping[str, Search]) -> list[str]:
    """What is to be said where the search ended for want of requests."""
    most = most_rate(workload, slo)
    ended = [name for name, search in searches.items() if any(search.best(share)[0] >= most for share in SHARES)]
    if most == MOST_RATE or (most >= LEAST_RATE and not ended):
        return []
    size = SIZE_OF_REQUESTS.get(workload.key, "requests")
    return [
        f"{', '.join(ended or searches)}: above {most:.3g} requests/s the workload has too few requests for "
        f"{lasting_s(slo):g} s, and fewer are over before a queue costs them the TTFT: --set {workload.key}.{size}=..."
    ]


def not_known(searches: Mapping[str, Search]) -> list[str]:
    """What is to be said where too few requests came at a rate to tell whether a share of them is kept."""
    found = []
    for share, least in LEAST_REQUESTS_OF.items():
        names = [name for name, search in searches.items() if search.unknown(share) > search.best(share)[0]]
        if names:
            found.append(
                f"{', '.join(names)}: of {share:.0%} nothing is known at rates of which fewer than {least} requests "
                f"came, as it would be all of them: --slo-seconds of {least} over the rate, and a workload with as many"
            )
    return found


def sent_late(searches: Mapping[str, Search], slo: Slo) -> list[str]:
    """What is to be said where the least rate that was too high for a side was that for the load generator."""
    found = []
    for name, search in searches.items():
        rates = search.rates()
        least = {search.best(share)[1] for share in search.shares} & rates.keys()
        for trial in (rates[rate] for rate in sorted(least)):
            if not trial.on_time:
                found.append(
                    f"{name}, {trial.rate:.3g} requests/s: the load generator sent a tenth of them later than by "
                    f"{1e3 * trial.late_p90_s:.0f} ms, of which {1e3 * LATE * slo.ttft_s:.0f} are allowed: "
                    "the side may take more than is found here"
                )
    return found


@dataclass
class Measurements:
    """All measurements of one workload. A side of which a request fails is measured no further.

    seconds: of one measurement. runs: those of which the rate was one to find, of each side numbered from 1. learned:
    what its decode workers say of their steps.
    failed: sides of which a request has failed, and at which rate; in the warm-up at none.
    """

    deployment: Deployment
    load: LoadGenerator
    workload: Workload
    slo: Slo
    seconds: float
    tokens: Tokens
    page_size: int
    show: Show
    runs: list[Run] = field(default_factory=list)
    problems: set[str] = field(default_factory=set)
    learned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sides = {variant.name: variant for variant in self.deployment.variants}

    def warm_up(self) -> None:
        """Ask each side once: what is set up only then is not measured, and the target learns what a step takes."""
        requests = open_loop(self.workload, 4.0, 5.0, self.tokens)
        for name in self.sides:
            self._asked(name, "warming up", requests, 0, None)

    def trial(self, name: str, rate: float) -> Trial | None:
        """Of side ``name`` at ``rate`` per second; None where a request fails, or has before."""
        at = f"{rate:.3g} requests/s"
        self.show.step(f"({self.workload.key}) {name}, {at}", 0, "")
        number = 1 + sum(run.variant == name for run in self.runs)
        requests = open_loop(self.workload, rate, self.seconds, self.tokens)
        run = None if name in self.failed else self._asked(name, at, requests, number, rate)
        if run is None:
            return None
        self.runs.append(run)
        self.problems.update(f"{name}, {at}: {problem}" for problem in run.problems)
        trial = Trial.of(rate, run, self.slo)
        self.show.done(f"{name}, {at}: {told(trial)}")
        return trial

    def _asked(self, name: str, at: str, requests: Workload, number: int, rate: float | None) -> Run | None:
        side = self.sides[name]
        try:
            run = run_once(self.deployment, self.load, requests, side, number, self.page_size)
            self.learned[name] = self.deployment.step_times(side)
        except PdRadixError as error:
            # Of anything else the side is not to blame, which had not even been asked then.
            self.failed[name] = rate if isinstance(error, RequestFailed) else None
            self.problems.add(f"{name}, {at}: {error}; it was measured no further")
            self.show.done(f"{name}, {at}: {error}")
            return None
        return run


@dataclass(frozen=True)
class Compared:
    """What comparing the answers of all measurements has found; ``looks`` as of `parted.look`."""

    looks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What was not looked at, and is no problem."""
        count = 0 if self.problems else len(parted.left_out(self.looks))
        return [f"{count} more answers part and were not asked for again"] * bool(count)


@dataclass
class Findings:
    """What is known of a workload so far: searches by side, and what comparing the answers has found.

    exact: as of `measure`.
    """

    measured: Measurements
    plan: Plan
    exact: bool
    searches: dict[str, Search] = field(init=False)
    compared: Compared = field(default_factory=Compared)
    interrupted: bool = False

    def __post_init__(self) -> None:
        most = most_rate(self.measured.workload, self.plan.slo)
        self.searches = {name: Search(most=most) for name in self.measured.sides}

    def find(self) -> None:
        """Measure all that `plan` asks for, and compare the answers."""
        measured = self.measured
        if self.plan.rates:
            measure_given(self.searches, self.plan.rates, measured.trial)
        else:
            search_all(self.searches, measured.trial)
        if self.exact:
            show = measured.show
            show.step(f"({measured.workload.key}) comparing the answers", 0, "")
            self.compared = compare(measured.deployment, measured.load, measured.workload, measured.runs, show)

    def entry(self) -> dict[str, Any]:
        """The workload's part of the report."""
        measured, slo, searches = self.measured, self.plan.slo, self.searches
        for name, rate in measured.failed.items():
            if rate is not None:
                searches[name].failed_at = rate
        problems = set(measured.problems)
        if self.interrupted:
            problems.add("interrupted before all rates were found and all answers compared")
        known = [NOT_COMPARED] * (not self.exact) + [RATES_GIVEN] * bool(self.plan.rates)
        notes = [*known, *self.compared.notes, *sent_late(searches, slo)]
        few = too_few(measured.workload, slo, searches)
        if any(search.trials for search in searches.values()):
            notes += few
        else:
            problems.update(few)  # There is no result.
        notes += not_known(searches)
        entry = entry_of(measured.workload, slo, searches, [*sorted(problems), *self.compared.problems], notes)
        return entry | {
            "step_times": measured.learned,
            "interrupted": self.interrupted,
            "differences": self.compared.looks,
        }


def measure(
    deployment: Deployment,
    load: LoadGenerator,
    workload: Workload,
    plan: Plan,
    tokens: Tokens,
    page_size: int,
    show: Show,
    exact: bool,
    keep: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> dict[str, Any]:
    """What the report has of one workload.

    exact: as of `turns.measure_all`; answers are compared only there. That a request fails is a problem of the report,
    which has what was found. keep: gets what was found where anything but Ctrl-C ends the search (a lost terminal,
    SIGTERM, a full disk), which is raised again.
    """
    seconds = max(plan.seconds, lasting_s(plan.slo))
    show.begin(f"({workload.key}) {workload.title}: {plan.slo}", 0)
    measured = Measurements(deployment, load, workload, plan.slo, seconds, tokens, page_size, show)
    measured.warm_up()
    findings = Findings(measured, plan, exact)
    try:
        findings.find()
    except KeyboardInterrupt:
        findings.interrupted = True
    except BaseException:
        # SIGHUP comes twice where a shell passes it on.
        with process_group.ends_held_back():
            findings.interrupted = True
            keep(findings.entry())
        raise
    show.end()
    return findings.entry()


def compare(
    deployment: Deployment, load: LoadGenerator, workload: Workload, runs: Sequence[Run], show: Show
) -> Compared:
    """Hold the answers of all ``runs`` against each other: request i of ``workload`` is the same at every rate."""
    partings = parted.find(runs)
    if not partings:
        return Compared()
    try:
        looks = parted.look(deployment, load, workload, partings, show.done, parted.MOST_JUDGED)
    except PdRadixError as error:
        number = len({parting.number for parting in partings})
        told = f"answers to {number} requests are not identical, and could not be asked for again: {error}"
        return Compared(problems=[told])
    return Compared(looks, parted.problems(looks))


def entry_of(
    workload: Workload,
    slo: Slo,
    searches: Mapping[str, Search],
    problems: Sequence[str],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """A workload's part of the report. problems: what makes the command fail; notes: what else a reader has to know."""
    return {
        "key": workload.key,
        "title": workload.title,
        "sizes": workload.sizes,
        "slo": dataclasses.asdict(slo),
        "goodput": {
            name: {f"{share:g}": trial and trial.rate for share in SHARES for trial in [search.goodput(share)]}
            for name, search in searches.items()
        },
        "most_rate": most_rate(workload, slo),
        "trials": {name: [dataclasses.asdict(t) for t in search.trials] for name, search in searches.items()},
        "failed_at": {name: search.failed_at for name, search in searches.items() if search.failed_at < math.inf},
        "problems": list(problems),
        "notes": list(notes),
    }


def told(trial: Trial) -> str:
    """A measurement in a line."""
    return (
        f"{trial.kept:.0%} of {trial.requests} requests within both, {trial.requests_per_s:.2f} requests/s, "
        f"TTFT p90 {1e3 * trial.ttft_p90_s:.0f} ms, ITL mean {1e3 * trial.itl_mean_s:.1f} ms, "
        f"p90 {1e3 * trial.itl_p90_s:.1f} ms"
        + ("" if trial.on_time else f"; sent too late: by {1e3 * trial.late_p90_s:.0f} ms p90")
    )


# ------------------------------------------------------------------------------------------------------------ report


def table(entry: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: of each side its goodput, and what clients saw at that rate."""
    heading = ["side"]
    for share in SHARES:
        heading += [f"requests/s at {share:.0%}", "TTFT p90, ms", "ITL mean, ms"]
    rows = []
    for name, rates in entry["goodput"].items():
        row = [name]
        measured = Search()
        measured.trials = [Trial(**t) for t in entry["trials"][name]]
        measured.failed_at = entry["failed_at"].get(name, math.inf)
        for share in SHARES:
            rate = rates[f"{share:g}"]
            of_rate = [t for t in entry["trials"][name] if t["rate"] == rate]
            found = max(of_rate, key=lambda t: (t["on_time"], t["kept"]), default=None)
            row += [
                _rate_told(measured, share),
                "" if found is None else f"{1e3 * found['ttft_p90_s']:.0f}",
                "" if found is None else f"{1e3 * found['itl_mean_s']:.1f}",
            ]
        rows.append(row)
    return heading, rows


def _rate_told(measured: Search, share: float) -> str:
    """The greatest rate at which ``share`` is kept, or what else is known of it."""
    right, wrong = measured.best(share)
    if not right:
        if wrong < math.inf:
            return f"below {wrong:.3g}"
        return f"fewer than {LEAST_REQUESTS_OF[share]} requests" if measured.unknown(share) else "not measured"
    if wrong == math.inf:
        return f"at least {right:.2f}"
    # What lies between two rates that are further apart than a search leaves them was not measured.
    return f"{right:.2f}" + (f" to below {wrong:.3g}" if wrong / right > PRECISION else "")


def charts(entry: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Chart]:
    """By the name of the file: goodput over the rate, and what ITL is paid for requests per second."""
    trials = {name: [Trial(**t) for t in found] for name, found in entry["trials"].items()}
    more = iter(MORE_COLORS * len(trials))
    colors = {name: COLORS.get(name) or next(more) for name in trials}

    def lines(x: Callable[[Trial], float], y: Callable[[Trial], float]) -> list[Line]:
        return [
            Line(name, colors[name], [(x(t), y(t)) for t in sorted(found, key=lambda t: t.rate)])
            for name, found in trials.items()
        ]

    slo = Slo(**entry["slo"])
    note = caption(setting, entry, "each point is one run")
    return {
        "goodput": Chart(
            f"Requests/s within {slo}",
            "requests that come, per second",
            "within both, per second",
            lines(lambda t: t.rate, lambda t: t.good_per_s),
            note=note,
        ),
        "itl": Chart(
            "ITL and requests/s",
            "requests answered per second",
            "ITL mean, ms",
            lines(lambda t: t.requests_per_s, lambda t: 1e3 * t.itl_mean_s),
            mark=(1e3 * slo.itl_s, "target"),
            note=note,
        ),
    }


def markdown(document: Mapping[str, Any]) -> str:
    """The report."""
    setting = document["setting"]
    facts = ", ".join(f"{key} {setting[key]}" for key in ("machine", "model", "dtype", "date") if key in setting)
    lines = ["# Goodput", "", f"    {setting.get('command', '')}", "", facts, ""]
    for entry in document["workloads"]:
        heading, rows = table(entry)
        lines += [f"## ({entry['key']}) {entry['title']}", "", f"Promised: {Slo(**entry['slo'])}.", ""]
        lines += ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines += ["", f"![goodput]({entry['key']}-goodput.svg)", "", f"![ITL]({entry['key']}-itl.svg)", ""]
        for name, trials in entry["trials"].items():
            lines += [f"**{name}**", ""]
            lines += [f"- {t['rate']:.3g}/s: {told(Trial(**t))}" for t in sorted(trials, key=lambda t: t["rate"])]
            lines.append("")
        for name, states in entry.get("step_times", {}).items():
            lines += [f"- {name} has learned: {json.dumps(state)}" for state in states]
        lines += [f"- Note: {note}" for note in entry.get("notes", ())]
        lines += [f"- {text}" for text in parted.sentences(entry.get("differences", ()))]
        lines += [f"- FAILED: {problem}" for problem in entry["problems"]]
    return "\n".join(lines).rstrip() + "\n"


def write(document: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the report as JSON (null for what is not known), Markdown and pictures. Returns their paths."""
    files = {
        "goodput.json": as_json(document),
        "goodput.md": markdown(document),
    }
    for entry in document["workloads"]:
        files |= {
            f"{entry['key']}-{name}.svg": chart.picture() for name, chart in charts(entry, document["setting"]).items()
        }
    for name, text in files.items():
        write_whole(out / name, text)
    return [out / name for name in files]
