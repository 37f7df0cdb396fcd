"""Goodput: the highest request rate of a side at which enough requests keep a TTFT and an ITL limit.

Requests arrive by a clock and wait for no answer, so overload shows as waiting: as a Poisson process, or at a trace's
times scaled to the rate. For each side the highest rate is searched at which 90%, and 99%, of requests keep both
limits: doubling until they do not, then bisection. The sides alternate from rate to rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import process_group
from sglang_pd_radix.tools.progress import Display

from . import parted
from .asked import RequestFailed
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
from .report import markdown_table
from .workload import Request, Tokens, Workload

#: Least requests of one measurement: fewer say nothing about 99%, and little about 90%.
LEAST_REQUESTS = 20
#: Least duration of a measurement, times the TTFT limit. At a rate too high by `PRECISION`, a request that arrives
#: after t seconds waits (PRECISION - 1) t: a tenth of them miss the TTFT only after 7.4 times as long.
LASTING = 8.0
#: The size that gives a workload more requests, if not ``requests``.
SIZE_OF_REQUESTS = {"b": "prefixes", "d": "herds"}
ITL_OPTION, TTFT_OPTION = "--disaggregation-decode-itl-target", "--disaggregation-decode-ttft-target"
#: The targets set on decode, as a part of the limits: clients see 4 to 8% more than decode's steps, and a longer TTFT
#: than decode's queue.
TARGET_PART = 0.9
RATES_GIVEN = "the rates were given: of a side that keeps its greatest, a greater one was not tried"
NOT_COMPARED = "answers are not compared: in this type rounding parts them (in float32 they are)"
#: Longest time accepted, seconds.
DAY_S = 86400.0


@dataclass(frozen=True)
class Slo:
    """The limits of a request: seconds to the first token, and mean seconds between later ones."""

    ttft_s: float
    itl_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses ``ttft=MS,itl=MS``. Raises PdRadixError."""
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
        """The side with both limits as targets."""
        itl_ms, ttft_ms = (f"{1000 * TARGET_PART * promised:g}" for promised in (self.itl_s, self.ttft_s))
        return Side("target", True, (ITL_OPTION, itl_ms, TTFT_OPTION, ttft_ms))

    def __str__(self) -> str:
        return f"TTFT {1000 * self.ttft_s:g} ms, ITL {1000 * self.itl_s:g} ms"


@dataclass(frozen=True)
class Plan:
    """The measurements of a workload.

    seconds: of one measurement; `lasting_s` if longer. rates: (side, requests per second) to measure in this order
    instead of a search.
    """

    slo: Slo
    seconds: float
    rates: Sequence[tuple[str, float]] = ()


def open_loop(workload: Workload, rate: float, seconds: float, tokens: Tokens) -> Workload:
    """Requests of ``workload`` that arrive at ``rate`` per second for about ``seconds``, and wait for no answer.

    At their own times, scaled; or at random ones, equal for all sides and, scaled, for all rates. Raises PdRadixError
    for a chat, whose prompts depend on its answers.
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
    # Scaled to exactly the mean rate: few random arrivals would have another.
    pace = (len(times) - 1) / (times[-1] - times[0]) / rate if len(times) > 1 and times[-1] > times[0] else 0.0
    timed = [
        dataclasses.replace(request, arrival_s=pace * (at - times[0]))
        for request, at in zip(requests, times, strict=True)
    ]
    warm: list[Request] = [request for asked in workload.warm for request in asked]
    return dataclasses.replace(
        workload, rounds=[timed], warm=[warm] if warm else [], concurrency=None, stream=False, may_refuse=True
    )


def lasting_s(slo: Slo) -> float:
    """Seconds of arrivals after which a growing queue has cost requests the TTFT limit."""
    return LASTING * slo.ttft_s


def most_rate(workload: Workload, slo: Slo) -> float:
    """The highest rate, per second, for which ``workload`` has requests for `lasting_s`."""
    return min(MOST_RATE, (workload.requests - 1) / lasting_s(slo))


def too_few(workload: Workload, slo: Slo, searches: Mapping[str, Search]) -> list[str]:
    """A note if a search ended for lack of requests."""
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
    """A note if too few requests came at a rate to judge a share."""
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
    """A note if a side's lowest rate that was too high was so for the load generator."""
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
    """All measurements of one workload. A side ends with its first failed request.

    seconds: of one measurement. runs: those of searched rates, numbered per side from 1. failed:
    sides with a failed request, and its rate; None in the warm-up.
    """

    deployment: Deployment
    load: LoadGenerator
    workload: Workload
    slo: Slo
    seconds: float
    tokens: Tokens
    page_size: int
    show: Display
    runs: list[Run] = field(default_factory=list)
    problems: set[str] = field(default_factory=set)
    failed: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sides = {variant.name: variant for variant in self.deployment.variants}

    def warm_up(self) -> None:
        """Send each side requests once: sets up memory and kernels, and trains the ITL target."""
        requests = open_loop(self.workload, 4.0, 5.0, self.tokens)
        for name in self.sides:
            self._asked(name, "warming up", requests, 0, None)

    def trial(self, name: str, rate: float) -> Trial | None:
        """Measure side ``name`` at ``rate`` per second; None if a request fails or has failed before."""
        at = f"{rate:.3g} requests/s"
        number = 1 + sum(run.variant == name for run in self.runs)
        requests = open_loop(self.workload, rate, self.seconds, self.tokens)
        run = None if name in self.failed else self._asked(name, at, requests, number, rate)
        if run is None:
            return None
        self.runs.append(run)
        self.problems.update(f"{name}, {at}: {problem}" for problem in run.problems)
        trial = Trial.of(rate, run, self.slo)
        self.show.now(f"{name}, {at}: {told(trial)}")
        return trial

    def _asked(self, name: str, at: str, requests: Workload, number: int, rate: float | None) -> Run | None:
        side = self.sides[name]
        try:
            run = run_once(self.deployment, self.load, requests, side, number, self.page_size)
        except PdRadixError as error:
            # Other errors are not the side's fault.
            self.failed[name] = rate if isinstance(error, RequestFailed) else None
            self.problems.add(f"{name}, {at}: {error}; it was measured no further")
            self.show.now(f"{name}, {at}: {error}")
            return None
        return run


@dataclass(frozen=True)
class Compared:
    """Compared answers of all measurements; ``looks`` as in `parted.look`."""

    looks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Notes on answers not looked at."""
        count = 0 if self.problems else len(parted.left_out(self.looks))
        return [f"{count} more answers part and were not asked for again"] * bool(count)


@dataclass
class Findings:
    """Results of a workload so far: searches by side, and compared answers.

    exact: as in `measure`.
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
        """Run the measurements of `plan`, and compare the answers."""
        measured = self.measured
        if self.plan.rates:
            measure_given(self.searches, self.plan.rates, measured.trial)
        else:
            search_all(self.searches, measured.trial)
        if self.exact:
            show = measured.show
            show.now(f"({measured.workload.key}) comparing the answers")
            self.compared = compare(measured.deployment, measured.load, measured.workload, measured.runs, show)

    def entry(self) -> dict[str, Any]:
        """The workload's entry of the report."""
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
    show: Display,
    exact: bool,
    keep: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> dict[str, Any]:
    """Measure one workload; returns its entry of the report.

    exact: as in `turns.measure_all`; answers are compared only then. A failed request is a problem in the report. keep:
    called with the results so far if something other than Ctrl-C ends the search (a lost terminal, SIGTERM, a full
    disk), which is raised again.
    """
    seconds = max(plan.seconds, lasting_s(plan.slo))
    show.done(f"({workload.key}) {workload.title}: {plan.slo}")
    measured = Measurements(deployment, load, workload, plan.slo, seconds, tokens, page_size, show)
    measured.warm_up()
    findings = Findings(measured, plan, exact)
    try:
        findings.find()
    except KeyboardInterrupt:
        findings.interrupted = True
    except BaseException:
        # A shell that passes SIGHUP on sends it twice.
        with process_group.ends_held_back():
            findings.interrupted = True
            keep(findings.entry())
        raise
    return findings.entry()


def compare(
    deployment: Deployment, load: LoadGenerator, workload: Workload, runs: Sequence[Run], show: Display
) -> Compared:
    """Compare the answers of all ``runs`` without refusals: request i of ``workload`` is the same at every rate."""
    partings = parted.find([run for run in runs if not run.refused])
    if not partings:
        return Compared()
    try:
        looks = parted.look(deployment, load, workload, partings, show.now, parted.MOST_JUDGED)
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
    """A workload's entry of the report. problems: fail the command. notes: other remarks."""
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
    """A measurement as one line."""
    return (
        f"{trial.kept:.0%} of {trial.requests} requests within both ({trial.in_time_per_s:.2f}/s), "
        + (f"{trial.refused / trial.requests:.0%} refused, " if trial.refused else "")
        + f"{trial.requests_per_s:.2f} requests/s, "
        f"TTFT p90 {1e3 * trial.ttft_p90_s:.0f} ms, ITL mean {1e3 * trial.itl_mean_s:.1f} ms, "
        f"p90 {1e3 * trial.itl_p90_s:.1f} ms"
        + ("" if trial.on_time else f"; sent too late: by {1e3 * trial.late_p90_s:.0f} ms p90")
    )


def table(entry: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: each side's goodput, and what clients saw at that rate."""
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
    """The highest rate at which ``share`` is kept, or the known bounds."""
    right, wrong = measured.best(share)
    if not right:
        if wrong < math.inf:
            return f"below {wrong:.3g}"
        return f"fewer than {LEAST_REQUESTS_OF[share]} requests" if measured.unknown(share) else "not measured"
    if wrong == math.inf:
        return f"at least {right:.2f}"
    # Rates further apart than a search's precision were not measured in between.
    return f"{right:.2f}" + (f" to below {wrong:.3g}" if wrong / right > PRECISION else "")


def markdown(document: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    setting = document["setting"]
    facts = ", ".join(f"{key} {setting[key]}" for key in ("machine", "model", "dtype", "date") if key in setting)
    lines = ["# Goodput", "", f"    {setting.get('command', '')}", "", facts, ""]
    for entry in document["workloads"]:
        heading, rows = table(entry)
        lines += [f"## ({entry['key']}) {entry['title']}", "", f"Promised: {Slo(**entry['slo'])}.", ""]
        lines += [markdown_table(heading, rows), ""]
        for name, trials in entry["trials"].items():
            lines += [f"**{name}**", ""]
            lines += [f"- {t['rate']:.3g}/s: {told(Trial(**t))}" for t in sorted(trials, key=lambda t: t["rate"])]
            lines.append("")
        lines += [f"- Note: {note}" for note in entry.get("notes", ())]
        lines += [f"- {text}" for text in parted.sentences(entry.get("differences", ()))]
        lines += [f"- FAILED: {problem}" for problem in entry["problems"]]
    return "\n".join(lines).rstrip() + "\n"
