"""What the results of a part's commands come to."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from collections.abc import Sequence
from typing import Any

from sglang_pd_radix.tools.bench import report
from sglang_pd_radix.tools.bench.chart import Chart, Line
from sglang_pd_radix.tools.cluster import option_value

from .outcome import FAILED, PASSED, UNJUDGED, Outcome, Picture, Table
from .runner import Done, ended_with, read_json, without_result

#: Where each command writes its result, in the directory of its step.
VERIFY, DEMO, BENCH, PYTEST, STORM = "verdict.json", "demo.json", "report/report.json", "junit.xml", "storm.json"
_MIB = 2**20


def _word(failures: Sequence[str], unknown: Sequence[str] = ()) -> str:
    return FAILED if failures else UNJUDGED if unknown else PASSED


def _why(failures: Sequence[str], unknown: Sequence[str] = ()) -> str:
    """The first of them, and how many more there are."""
    told = failures or unknown
    return "" if not told else told[0] + (f" (and {len(told) - 1} more)" if len(told) > 1 else "")


def _lines(lines: Sequence[str], failures: Sequence[str], unknown: Sequence[str] = ()) -> tuple[str, ...]:
    return (*lines, *(f"NOT JUDGED: {text}" for text in unknown), *(f"FAILED: {text}" for text in failures))


# ----------------------------------------------------------------------------------------------------- verify and demo


def verify(done: Sequence[Done]) -> Outcome:
    """Of `pd-radix verify --json`."""
    found = read_json(done[-1].result / VERIFY)
    if found is None:
        return without_result(done[-1])
    failures, unknown = found["failures"], found["unknown"]
    setting = ", ".join(f"{name} {value}" for name, value in found["setting"].items())
    why = _why(failures, unknown)
    return Outcome(_word(failures, unknown), why, _lines([setting, *found["lines"]], failures, unknown))


def demo(done: Sequence[Done]) -> Outcome:
    """Of `pd-radix demo --json`."""
    found = read_json(done[-1].result / DEMO)
    if found is None:
        return without_result(done[-1])
    setting, runs, failures = found["setting"], found["runs"], found["failures"]
    asked = sum(len(turn["replies"]) for turn in runs["on"]["turns"])
    same = asked - len(found["differences"])
    limit = found["rounding_limit"]
    lines = [
        f"{setting['device']} {setting['dtype']} over {setting['backend']}, pages of {setting['page_size']} tokens",
        f"{same} of {asked} answers identical with the flag off and on"
        + (f"; what rounding may do to a log-probability: {limit:.2g} nats" if limit and same < asked else ""),
        f"KV sent: {found['sent_bytes_off_over_on'] or 0:.2f} times as much off as on; on is "
        f"{found['sent_bytes_on_over_least'] or 0:.3f} times the least possible, "
        f"{found['sent_bytes_on_over_least_from_turn_2'] or 0:.3f} from turn 2 on",
        f"TTFT from turn 2 on: {found['ttft_off_over_on']:.2f} times as long off as on",
        *found["differences"],
        *found["notes"],
    ]
    heading = ["turn", "prompt tokens", "reused on decode"]
    heading += [f"MiB sent, {name}" for name in runs] + [f"TTFT, s, {name}" for name in runs]
    rows = []
    for turns in zip(*(run["turns"] for run in runs.values()), strict=True):
        on = turns[1]
        row = [str(on["turn"]), str(on["prompt_tokens"]), f"{on['reused_tokens'] / on['prompt_tokens']:.0%}"]
        row += [f"{turn['sent_bytes'] / _MIB:.1f}" for turn in turns]
        rows.append(row + [f"{turn['ttft_median_s']:.3f}" for turn in turns])
    return Outcome(_word(failures), _why(failures), _lines(lines, failures), [Table("Turns", heading, rows)])


# --------------------------------------------------------------------------------------------------------------- bench


def _report(one: Done) -> Any:
    """The report of a benchmark; None if it has left none."""
    found = read_json(one.result / BENCH)
    return found and report.of_json(found)


def bench(done: Sequence[Done], pictures: Sequence[str]) -> Outcome:
    """Of `pd-radix bench --out`. pictures: which of its charts."""
    found = _report(done[-1])
    if found is None:
        return without_result(done[-1])
    problems = [f"({entry['key']}) {problem}" for entry in found["workloads"] for problem in entry["problems"]]
    problems += _left_out(done[-1], found)
    lines = [report.describe(found)]
    tables = [Table("Over all", *report.headline(found))]
    drawn = []
    for entry in found["workloads"]:
        name = f"({entry['key']}) {entry['title']}"
        lines += [f"({entry['key']}) {line}" for line in (report.sizes_line(entry), *report.answers(entry))]
        tables.append(Table(name, *report.table(entry)))
        if entry["chat"]:
            tables.append(Table(f"{name}: by turn", *report.turns_table(entry)))
        if report.in_rounds(entry):
            tables.append(Table(f"{name}: by round", *report.rounds_table(entry)))
        charts = report.charts(entry)
        drawn += [Picture(f"{name}: {charts[key].title}", charts[key].picture()) for key in pictures if key in charts]
    return Outcome(_word(problems), _why(problems), _lines(lines, problems), tables, drawn)


def _left_out(one: Done, found: dict[str, Any]) -> list[str]:
    """The workloads that a benchmark was asked for and has not told of, unless it was stopped."""
    asked = (option_value(one.command, "--only") or "").split(",")
    missing = [key for key in asked if key and key not in [entry["key"] for entry in found["workloads"]]]
    if not missing or one.ended.stopped:
        return []
    return [ended_with(one, f" and without {', '.join(f'({key})' for key in missing)}")]


def side_figures(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the first workload of a benchmark: medians of each side."""
    summary = found["workloads"][0]["summary"]
    return {side: {key: spread["median"] for key, spread in of.items()} for side, of in summary.items()}


def exchange(done: Sequence[Done]) -> Outcome:
    """Of the same benchmark with another bound of running requests in each step: what ITL is paid for requests/s."""
    results = {one.name: _report(one) for one in done if one.name != "make-model"}
    found = {name: result for name, result in results.items() if _has_figures(result)}
    if not found:
        return _nothing(done)
    lost = [one for one in done if one.name in results and one.name not in found and not one.ended.stopped]
    problems = [f"{name}: {text}" for name, result in found.items() for text in result["workloads"][0]["problems"]]
    problems += [without_result(one).why for one in lost]
    problems += _crashed(done, found)
    points = {name: side_figures(result) for name, result in found.items()}
    heading = ["running at most", "side", "requests/s", "ITL mean, ms", "ITL p50, ms", "TTFT p50, ms", "running, most"]
    rows = [
        [
            name,
            side,
            f"{of['requests_per_s']:.2f}",
            f"{1e3 * of['itl_mean_s']:.1f}",
            f"{1e3 * of['itl_p50_s']:.1f}",
            f"{1e3 * of['ttft_p50_s']:.0f}",
            f"{of['running_max']:.0f}",
        ]
        for name, sides in points.items()
        for side, of in sides.items()
    ]
    curves = {side: curve([sides[side] for sides in points.values()]) for side in ("off", "on")}
    lines = [f"{len(points)} bounds of {len(done) - ('make-model' in [one.name for one in done])}", *at_equal(curves)]
    drawn = Chart(
        "What ITL is paid for requests/s",
        "requests/s",
        "ITL mean, ms",
        [Line(side, report.COLORS[side], [(x, 1e3 * y) for x, y in points]) for side, points in curves.items()],
    )
    tables = [Table("Bounds", heading, rows)]
    return Outcome(
        _word(problems), _why(problems), _lines(lines, problems), tables, [Picture(drawn.title, drawn.picture())]
    )


def _has_figures(result: Any) -> bool:
    return bool(result and result["workloads"])


def _nothing(done: Sequence[Done]) -> Outcome:
    """Of steps of which one that is needed has no figures: the first that ended by itself says why."""
    lost = [one for one in done if one.name != "make-model" and not _has_figures(_report(one))]
    first = next((one for one in (*done, *lost) if one.ended.code and not one.ended.stopped), None)
    return without_result(first or [*done[-1:], *lost][-1])


def _crashed(done: Sequence[Done], found: dict[str, Any]) -> list[str]:
    """Benchmarks that ended badly, though their figures are there and nothing is wrong with them."""
    return [
        ended_with(one)
        for one in done
        if one.name in found
        and one.ended.code
        and not one.ended.stopped
        and not found[one.name]["workloads"][0]["problems"]
    ]


def curve(points: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    """Requests/s and mean ITL (seconds) of a side, by ITL."""
    return sorted(((of["requests_per_s"], of["itl_mean_s"]) for of in points), key=lambda point: point[1])


def at_equal(curves: dict[str, list[tuple[float, float]]]) -> list[str]:
    """What the flag brings where both sides have the same mean ITL, of each of off's points that lies between two of
    on's; between those a straight line is taken."""
    told = []
    for rate, itl in curves["off"]:
        for (low_rate, low), (high_rate, high) in zip(curves["on"], curves["on"][1:], strict=False):
            if low <= itl <= high and high > low:
                there = low_rate + (high_rate - low_rate) * (itl - low) / (high - low)
                told.append(
                    f"at off's mean ITL of {1e3 * itl:.1f} ms: {there / rate:.2f} times its requests/s "
                    f"({there:.2f} and {rate:.2f}, between two bounds of on)"
                )
                break
    return told or ["no mean ITL of off lies between two of on's, so there is none at which they can be compared"]


def placement(done: Sequence[Done]) -> Outcome:
    """Of the same benchmark with prefill on decode's GPU and on another."""
    results = {one.name: _report(one) for one in done if one.name != "make-model"}
    if not results or not all(map(_has_figures, results.values())):
        return _nothing(done)
    problems = [f"{name}: {text}" for name, result in results.items() for text in result["workloads"][0]["problems"]]
    problems += _crashed(done, results)
    heading = ["prefill on", "side", "requests/s", "TTFT p50, ms", "ITL mean, ms", "ITL p99, ms"]
    rows = [
        [
            name,
            side,
            f"{of['requests_per_s']:.2f}",
            *(f"{1e3 * of[key]:.1f}" for key in ("ttft_p50_s", "itl_mean_s", "itl_p99_s")),
        ]
        for name, result in results.items()
        for side, of in side_figures(result).items()
    ]
    return Outcome(_word(problems), _why(problems), _lines([], problems), [Table("Placements", heading, rows)])


# ----------------------------------------------------------------------------------------------------- tests and storm


def tests(done: Sequence[Done]) -> Outcome:
    """Of `pytest --junit-xml`. What was left out is not passed."""
    last = done[-1]
    try:
        root = xml.parse(last.result / PYTEST).getroot()
    except (OSError, xml.ParseError):
        return without_result(last)
    cases = list(root.iter("testcase"))
    failures = [
        f"{case.get('name')}: {(found.get('message') or 'no message').splitlines()[0]}"
        for case in cases
        for found in (*case.findall("failure"), *case.findall("error"))
    ]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(skipped) - len(failures)
    unknown = [] if passed else ["no test has run"]
    if skipped:
        reasons = sorted({case.find("skipped").get("message") or "" for case in skipped})  # type: ignore[union-attr]
        unknown.append(f"{len(skipped)} tests were skipped: {'; '.join(reasons)}")
    if last.ended.code and not failures and not unknown:
        failures.append(f"pytest ended with exit status {last.ended.code}")
    lines = [f"{passed} of {len(cases)} tests passed"]
    tail = last.log[-30:] if failures else ()
    return Outcome(_word(failures, unknown), _why(failures, unknown), _lines(lines, failures, unknown), tail=tail)


def storm(done: Sequence[Done]) -> Outcome:
    """Of `storm.py`."""
    found = read_json(done[-1].result / STORM)
    if found is None:
        return without_result(done[-1])
    problems, unknown = found["problems"], found["not_judged"]
    heading = ["what was done", "asked", "right", "as likely", "failed", "slowest, s", "held by decode, tokens"]
    rows = [
        [one["what"], *(str(one[key]) for key in ("asked", "right", "tied", "failed")), f"{one['slowest_s']:.1f}"]
        + [str(one["held"])]
        for one in found["rounds"]
    ]
    lines = _lines(found["judged"], problems, unknown)
    return Outcome(_word(problems, unknown), _why(problems, unknown), lines, [Table("Rounds", heading, rows)])


def chaos(done: Sequence[Done]) -> Outcome:
    """Of `benchmark/chaos.py --json`.

    Growth takes an hour to be seen: where it says that it was too short for that, it is told, and not what this part is
    for. All else that it leaves open is open.
    """
    found = read_json(done[-1].result / STORM)
    if found is None:
        return without_result(done[-1])
    ended = found.get("ended", "")
    problems = [text for text in found["problems"] if text != ended]
    growth = found.get("growth_not_judged", [])
    unknown = [ended] if ended else []
    unknown += [text for text in found["not_judged"] if text not in growth]
    whole = found.get("storm", {}).get("ended", {}).get("whole", 0)
    unknown += [] if problems or whole else ["no answer was complete in the storm"]
    lines = [*found["judged"], *(f"not judged in so short a storm: {text}" for text in growth)]
    if "storm" in found:
        of = found["storm"]
        how_many = ", ".join(f"{count} {how}" for how, count in of["ended"].items())
        events = len(found["events"])
        lines.insert(0, f"{of['requests']} requests in {of['seconds']:.0f} s, {events} events: {how_many}")
    return Outcome(_word(problems, unknown), _why(problems, unknown), _lines(lines, problems, unknown))
