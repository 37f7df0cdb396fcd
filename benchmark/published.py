"""What the documentation publishes: the tables that are made of the records in ``benchmark/runs``, and of nothing else.

`pd-radix bench` writes a record beside its report, `bench.record`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import parted, report
from sglang_pd_radix.tools.bench.chart import COLORS, Chart, Line
from sglang_pd_radix.tools.bench.record import Record

Records = Mapping[str, Record]


def demo_record(document: Mapping[str, Any], command: str) -> Record:
    """The record of what ``pd-radix demo --json`` wrote."""
    kept = ("workload", "least_bytes", "identical")
    sent = {name: run["totals"]["sent_bytes"] for name, run in document["runs"].items()}
    setting = {k: v for k, v in document["setting"].items() if k not in ("engine_options", "seconds")}
    return {"setting": {"command": command, **setting}, **{k: document[k] for k in kept}, "sent_bytes": sent}


def load(directory: Path) -> dict[str, Record]:
    """All records, by the names of their files. Raises PdRadixError."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PdRadixError(f"cannot read the record {path}: {error}") from None
    return found


# ------------------------------------------------------------------------------------------------------ pairs of runs


def pairs(entry: Record, side: str) -> list[tuple[Record, Record]]:
    """The runs of off and of ``side`` that were next to each other, number by number."""
    runs = {(run["variant"], run["number"]): run for run in entry["runs"]}
    numbers = sorted({number for _, number in runs})
    return [(runs["off", n], runs[side, n]) for n in numbers if ("off", n) in runs and (side, n) in runs]


def over(pair: tuple[Record, Record], key: str) -> float:
    """The side's figure over off's; NaN where one of them has none."""
    below, above = (run["figures"].get(key) for run in pair)
    return above / below if above is not None and below else math.nan


def median_pair(found: Sequence[tuple[Record, Record]]) -> tuple[Record, Record]:
    """The pair whose gain in requests/s is the median, of an even number the lower one of the middle two.

    Everything that is printed of it is of the same two runs, so that a reader can divide it.
    """
    return sorted(found, key=lambda pair: over(pair, "requests_per_s"))[(len(found) - 1) // 2]


def worst(found: Sequence[tuple[Record, Record]], figure: report.Figure) -> float:
    """The least favourable ratio of all pairs."""
    ratios = [ratio for ratio in (over(pair, figure.key) for pair in found) if not math.isnan(ratio)]
    return (min if figure.good == "more" else max)(ratios, default=math.nan)


# ------------------------------------------------------------------------------------------------------------- README


@dataclass(frozen=True)
class Row:
    """A row of the tables: of which record, workload and side, what it says of them, and the page that says how."""

    record: str
    key: str
    side: str
    text: str
    how: str = ""


#: A page below docs.
_GPU = "evidence.md#h100-2026-11-26"
GPU_RECORD = "h100"
ROWS = (
    Row("a", "a", "on", "20 shared prefixes, 128 clients, decode short of memory, from a cold start"),
    Row("g", "g", "on", "new prefixes every round, into a pool full of old ones"),
    Row("aw", "aw", "on", "warm: 4 of 20 prefixes at a time, each asked for before"),
    Row(GPU_RECORD, "a", "on", "20 shared prefixes, 128 clients, 0.94 billion parameters, bfloat16 (H100)", _GPU),
    Row(GPU_RECORD, "a", "shared", "the same, shared prefixes read once", _GPU),
)
_FIGURES = {figure.key: figure for figure in report.FIGURES}
_DOC_FIGURES = ("requests_per_s", "ttft_p50_s", "ttft_p99_s", "itl_mean_s")
_DOC_SIDES = ("sent_over_least", "peak_over_least", "running_max")
_ALL_FIGURES = (*_DOC_FIGURES, *_DOC_SIDES)
_MARK = "<!-- {}: made by `python benchmark/figures.py` from benchmark/runs -->"
_END = "<!-- end of {} -->"


def _record(records: Records, name: str) -> Record:
    if name not in records:
        raise PdRadixError(f"there is no record {name}.json in benchmark/runs, of which README's figures are made")
    return records[name]


def _entry(records: Records, name: str, key: str) -> Record:
    return next(entry for entry in _record(records, name)["workloads"] if entry["key"] == key)


def _digits(value: float) -> str:
    """Three digits, more of a great number."""
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _ratio_digits(value: float) -> str:
    """Two decimals, three of a small one, so that it is what dividing gives."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _change(pair: tuple[Record, Record], key: str, unit: float) -> str:
    return " → ".join(_digits(run["figures"][key] / unit) for run in pair)


def readme_row(records: Records, row: Row) -> list[str]:
    """The cells of one row. Raises PdRadixError where its record is not there."""
    found = pairs(_entry(records, row.record, row.key), row.side)
    pair = median_pair(found)

    def ratio(key: str) -> str:
        return f"{_ratio_digits(over(pair, key))} x ({_ratio_digits(worst(found, _FIGURES[key]))})"

    return [
        row.text,
        f"{_change(pair, 'requests_per_s', 1)}: **{ratio('requests_per_s')}**",
        f"{_change(pair, 'ttft_p50_s', 1e-3)}: {ratio('ttft_p50_s')}",
        f"{_change(pair, 'itl_mean_s', 1e-3)}: {ratio('itl_mean_s')}",
        _change(pair, "sent_bytes", 2**20),
    ]


HEADING = ("workload", "requests/s", "TTFT p50, ms", "ITL mean, ms", "KV sent, MiB")


def readme(records: Records) -> str:
    """README's figures of GPUs, and of the demo."""
    table = report.markdown_table(HEADING, [readme_row(records, row) for row in ROWS if row.record == GPU_RECORD])
    return "\n\n".join((table, _READ, _demo(records)))


# --------------------------------------------------------------------------------------------------------------- chat


#: The records of ``pd-radix bench --aggregated`` by how many clients send long prompts beside the chats.
CHAT = {"nobody": "chat-0", "2 clients": "chat-2", "4 clients": "chat-4", "6 clients": "chat-6"}
CHAT_SIDES = {
    "off": "flag off",
    "sent": "flag, local prefill `off`",
    "on": "flag, defaults",
    "aggregated": "2 aggregated servers",
}
CHAT_HEADING = ("beside", "side", "TTFT p50 (p99), ms", "ITL mean (p99), ms", "requests/s", "runs")


def chat_rows(records: Records, beside: str) -> list[list[str]]:
    """The sides of the chat beside so many clients; each cell is the median of the runs. Raises PdRadixError."""
    (entry,) = _record(records, CHAT[beside])["workloads"]
    rows = []
    for side, text in CHAT_SIDES.items():
        runs = [run["figures"] for run in entry["runs"] if run["variant"] == side]

        def median(key: str, unit: float = 1e-3, runs: list[dict[str, float]] = runs) -> str:
            # A p99 of few values is none.
            known = [run[key] for run in runs if run.get(key) is not None]
            return _digits(statistics.median(known) / unit if known else math.nan)

        first = f"{median('later_ttft_p50_s')} ({median('later_ttft_p99_s')})"
        itl = f"{median('itl_mean_s')} ({median('itl_p99_s')})"
        rows.append([beside, text, first, itl, median("requests_per_s", 1), str(len(runs))])
    return rows


def readme_chat(records: Records) -> str:
    """README's table of the chat: beside the most clients."""
    rows = [row[1:4] for row in chat_rows(records, list(CHAT)[-1])]
    return report.markdown_table(CHAT_HEADING[1:4], rows)


def benchmarks_chat(records: Records) -> str:
    """The table of docs/benchmarks.md: all of them."""
    return report.markdown_table(CHAT_HEADING, [row for beside in CHAT for row in chat_rows(records, beside)])


_CHAT_COLORS = dict(zip(CHAT_SIDES, (COLORS[0], COLORS[3], COLORS[1], COLORS[2]), strict=True))
_CHAT_CHARTS = {
    "chat-ttft": ("Time to first token, turns 2 and later", "TTFT p50, ms", "later_ttft_p50_s"),
    "chat-itl": ("Inter-token latency", "ITL mean, ms", "itl_mean_s"),
}


def charts(records: Records) -> dict[str, Chart]:
    """The pictures of the chat by the names of their files, over how many clients are beside. Raises PdRadixError."""
    found = {}
    setting = _record(records, CHAT["nobody"])["setting"]
    note = (
        f"Chat: 4 clients, 6 turns, beside clients with new prompts of 3,500 tokens; {setting['model']}, "
        f"{setting['dtype']}; {setting['machine']}; n = {setting['runs']} runs; line: median, band: least to greatest"
    )
    for name, (title, label, key) in _CHAT_CHARTS.items():
        lines = []
        for side, text in CHAT_SIDES.items():
            band = []
            for record in CHAT.values():
                (entry,) = _record(records, record)["workloads"]
                values = [1e3 * run["figures"][key] for run in entry["runs"] if run["variant"] == side]
                band.append((int(record.partition("-")[2]), min(values), statistics.median(values), max(values)))
            points, limits = [(x, mid) for x, _, mid, _ in band], [(x, low, high) for x, low, _, high in band]
            lines.append(Line(text.replace("`", ""), _CHAT_COLORS[side], points, band=limits))
        found[name] = Chart(title, "clients with long prompts beside the chat", label, lines, note=note)
    return found


# --------------------------------------------------------------------------------------------------------- benchmarks


BENCHMARKS_HEADING = ("workload", "pairs", *(_FIGURES[key].name for key in _ALL_FIGURES), "command")


def benchmarks(records: Records) -> str:
    """The table of docs/benchmarks.md: every figure of every row, off -> on of the median pair."""
    rows = [benchmarks_row(records, row) for row in ROWS]
    return f"{report.markdown_table(BENCHMARKS_HEADING, rows)}\n\n{_answers(records)}"


def benchmarks_row(records: Records, row: Row) -> list[str]:
    """The cells of one row. Raises PdRadixError where its record is not there."""
    found = pairs(_entry(records, row.record, row.key), row.side)
    off, on = median_pair(found)
    how = f"[how]({row.how})" if row.how else f"`{records[row.record]['setting']['command']}`"
    return [row.text, str(len(found)), *(_both(off, on, _FIGURES[key], " → ") for key in _ALL_FIGURES), how]


_READ = "Each cell: off → on and on/off for the median pair of back-to-back runs; worst pair in brackets."


def _demo(records: Records) -> str:
    demo = _record(records, "demo")
    chat, sent, least = demo["workload"], demo["sent_bytes"], demo["least_bytes"]
    same = "all answers are the same" if demo["identical"] else "not all answers are the same"
    return (
        f"`{demo['setting']['command']}`, {chat['clients']} chats of {chat['turns']} turns: "
        f"{sent['off'] / 2**20:.0f} MiB of KV with the flag off, {sent['on'] / 2**20:.0f} MiB with it on "
        f"({sent['on'] / least:.3f} times the lower bound); {same}."
    )


def _answers(records: Records) -> str:
    """How many answers of the runs in float32 are the same, and what is known of the others."""
    asked = different = 0
    looks = []
    for name in dict.fromkeys(row.record for row in ROWS):
        if not records[name]["setting"]["dtype"].endswith("float32"):
            continue
        for entry in records[name]["workloads"]:
            asked += entry["requests"] * len(entry["runs"])
            different += sum(run["different_answers"] for run in entry["runs"])
            looks += entry["differences"]
    if not different:
        return f"All {asked:,} answers of the runs in float32 are the same."
    text = f"Of {asked:,} answers in float32, {asked - different:,} are those of the first run with the flag off"
    known = [distance for distance in map(parted.apart, looks) if distance is not None]
    if len(known) < len(looks) or not all(map(parted.explained, looks)):
        return f"{text}; rounding does not explain all of the others (benchmark/runs)."
    return f"{text}; the others part where two tokens, asked for again, are at most {max(known):.0e} nats apart."


# ------------------------------------------------------------------------------------------------------------ all runs


def runs_table(entry: Record, side: str) -> str:
    """All pairs of a side with off, a line each, the median one in bold."""
    found = pairs(entry, side)
    middle = median_pair(found)
    heading = ["pair", "first"]
    heading += [f"{_FIGURES[k].name}: off, {side}, ratio" for k in _DOC_FIGURES]
    heading += [f"{_FIGURES[k].name}: off, {side}" for k in _DOC_SIDES]
    rows = []
    for off, on in found:
        row = [str(off["number"]), "off" if off["turn"] < on["turn"] else side]
        for key in _DOC_FIGURES:
            figure = _FIGURES[key]
            row.append(f"{_both(off, on, figure)}, {_ratio(over((off, on), key))}")
        row += [_both(off, on, _FIGURES[key]) for key in _DOC_SIDES]
        rows.append([f"**{cell}**" for cell in row] if off is middle[0] else row)
    return report.markdown_table(heading, rows)


def _both(off: Record, on: Record, figure: report.Figure, between: str = ", ") -> str:
    values = (run["figures"].get(figure.key) for run in (off, on))
    return between.join("–" if value is None else report.number(value, figure) for value in values)


def _ratio(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def docs(records: Records) -> str:
    """Every pair of the runs behind the tables, for benchmark/runs."""
    parts = []
    for name, key in dict.fromkeys((row.record, row.key) for row in ROWS):
        entry, setting = _entry(records, name, key), records[name]["setting"]
        parts.append(f"**{name}** ({setting['date']}, {setting['machine']}; {entry['title']})")
        parts.append(f"    {setting['command']}")
        parts += [runs_table(entry, side) for side in entry["variants"][1:]]
        if "source" in records[name]:
            parts.append(records[name]["source"])
        else:
            parts.append("\n".join(f"* {text}" for text in report.answers(entry)))
    return "\n\n".join(parts)


def replaced(text: str, name: str, made: str) -> str:
    """``text`` with what is between the marks of ``name`` made anew. Raises PdRadixError where it has no such marks."""
    mark, end = _MARK.format(name), _END.format(name)
    before, found, rest = text.partition(mark)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise PdRadixError(f"there are no lines {mark} and {end}, between which the figures belong")
    return f"{before}{mark}\n\n{made}\n\n{end}{after}"
