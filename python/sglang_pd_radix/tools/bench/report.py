"""The report: a JSON document, and Markdown made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pd_radix.tools.up import write_whole

from . import breakdown, compared, parted
from .deploy import AGGREGATED
from .stats import LEAST_FOR_P99, Spread, paired_ratio

Document = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A row of the tables: its key among a run's figures, title and format.

    ``good``: whether "more" or "less" is better; "" if neither.
    """

    key: str
    name: str
    unit: float = 1.0
    digits: int = 2
    good: str = "less"


FIGURES = (
    Figure("requests_per_s", "requests/s", good="more"),
    Figure("output_tokens_per_s", "output tokens/s", digits=1, good="more"),
    Figure("ttft_p50_s", "TTFT p50, ms", 1e-3, 0),
    Figure("ttft_p99_s", "TTFT p99, ms", 1e-3, 0),
    Figure("itl_p50_s", "ITL p50, ms", 1e-3, 1),
    Figure("itl_p99_s", "ITL p99, ms", 1e-3, 1),
    Figure("itl_mean_s", "ITL mean, ms", 1e-3, 1),
    Figure("tpot_p50_s", "TPOT p50, ms", 1e-3, 1),
    Figure("tpot_p99_s", "TPOT p99, ms", 1e-3, 1),
    Figure("sent_bytes", "KV sent, MiB", 2**20, 1),
    Figure("sent_over_least", "KV sent / lower bound", digits=3),
    Figure("peak_over_least", "decode tokens held at most / lower bound", digits=3),
    Figure("answering_mean", "requests being answered, mean", digits=1, good=""),
    Figure("running_max", "requests running on decode, most seen", digits=0, good=""),
    # Least disturbed by other guests of a shared machine.
    Figure("prefill_cpu_s", "CPU time of prefill per request, ms", 1e-3, 2),
    Figure("decode_cpu_s", "CPU time of decode per request, ms", 1e-3, 2),
)
# For sides without a prefill worker.
CPU_FIGURE = Figure("cpu_s", "CPU time of all workers per request, ms", 1e-3, 2)
# Chats: TTFT of first turns, which cannot reuse anything, and of later ones.
CHAT_FIGURES = (
    Figure("first_ttft_p50_s", "TTFT of first turns p50, ms", 1e-3, 0),
    Figure("first_ttft_p99_s", "TTFT of first turns p99, ms", 1e-3, 0),
    Figure("later_ttft_p50_s", "TTFT of later turns p50, ms", 1e-3, 0),
    Figure("later_ttft_p99_s", "TTFT of later turns p99, ms", 1e-3, 0),
)
# Chats of many turns, and those where decode may compute prompts.
TURNS_FIGURES = (
    Figure("early_ttft_p50_s", "TTFT of turns 2 to 10 p50, ms", 1e-3, 0),
    Figure("early_ttft_p99_s", "TTFT of turns 2 to 10 p99, ms", 1e-3, 0),
    Figure("late_ttft_p50_s", "TTFT of turns from 11 on p50, ms", 1e-3, 0),
    Figure("late_ttft_p99_s", "TTFT of turns from 11 on p99, ms", 1e-3, 0),
    Figure("without_prefill", "later turns without prefill, %", 1e-2, 0, good="more"),
)
# Workloads beside clients that send long prompts all the time.
STEADY_FIGURES = (
    Figure("steady_per_s", "long prompts beside, answered/s", good="more"),
    Figure("steady_requests", "long prompts beside, answered", digits=0, good=""),
    Figure("steady_p50_s", "long prompts beside, time p50, ms", 1e-3, 0),
)
MORE_FIGURES = (*CHAT_FIGURES, *TURNS_FIGURES, *STEADY_FIGURES, CPU_FIGURE)
# Figures of the table over all workloads.
HEADLINE = ("requests_per_s", "ttft_p50_s", "ttft_p99_s", "itl_mean_s", "sent_bytes")
# Its figures of each single side.
OVER_LEAST = {"sent_over_least": "KV sent / lower bound", "peak_over_least": "held at most / lower bound"}


# ---------------------------------------------------------------------------------------------------------- figures


def figures_of(entry: Document) -> tuple[Figure, ...]:
    """The rows of a workload's table."""
    shown = {CPU_FIGURE: AGGREGATED.name in entry["variants"]}
    known = entry["runs"][0]["figures"]
    return (*FIGURES, *(figure for figure in MORE_FIGURES if shown.get(figure, figure.key in known)))


def finish(entry: Document) -> None:
    """Add to a workload's ``runs`` what needs all of them: page bytes, least bytes, ratios, identity.

    With the cache off every page of every prompt is sent. So its runs give the bytes per page for any model, data type
    and TP degree.
    """
    runs = entry["runs"]
    off = [run for run in runs if not run["radix"]]
    page_bytes = off[0]["figures"]["sent_bytes"] / off[0]["figures"]["prompt_pages"] if off else math.nan
    entry["page_bytes"] = page_bytes
    for run in runs:
        figures = run["figures"]
        least = figures["least_pages"] * page_bytes
        figures["least_bytes"] = least
        figures["sent_over_least"] = figures["sent_bytes"] / least if least else math.nan
    entry["summary"] = {
        name: {
            f.key: vars(Spread.of([run["figures"][f.key] for run in runs if run["variant"] == name]))
            for f in figures_of(entry)
        }
        for name in entry["variants"]
    }
    entry["ratios"] = {
        pair.label: {f.key: with_worst(f, ratio(entry, pair.below, pair.above, f.key)) for f in figures_of(entry)}
        for pair in pairs(entry)
    }


@dataclass(frozen=True)
class Pair:
    """Two variants: figures of ``above`` over those of ``below``."""

    below: str
    above: str

    @property
    def label(self) -> str:
        """Its key in a workload's ``ratios``: the own name of a side compared with off."""
        return self.above if self.below == "off" else self.title

    @property
    def title(self) -> str:
        return f"{self.above} / {self.below}"


def pairs(entry: Document) -> list[Pair]:
    """The comparisons: each side with off, and on with each further side."""
    off, on, *more = entry["variants"]
    found = [Pair(off, on)]
    for other in more:
        found += [Pair(off, other), Pair(other, on)]
    return found


def ratio(entry: Document, below: str, above: str, key: str) -> Spread:
    """``above`` over ``below`` of one figure, for each pair of neighbouring runs."""
    values = {name: [run["figures"][key] for run in entry["runs"] if run["variant"] == name] for name in (below, above)}
    return paired_ratio(values[above], values[below])


def with_worst(figure: Figure, spread: Spread) -> Document:
    """A spread of ratios with its least favourable pair; NaN if neither direction is better."""
    worst = {"more": spread.low, "less": spread.high}.get(figure.good, math.nan)
    return {**vars(spread), "worst": worst}


def compare_answers(texts: Sequence[Sequence[str]]) -> list[int]:
    """Number of answers of each run that differ from the first run's."""
    return [sum(a != b for a, b in zip(texts[0], run, strict=True)) for run in texts]


# -------------------------------------------------------------------------------------------------------------- JSON


def as_json(document: Mapping[str, Any]) -> str:
    """The report as JSON; NaN (unknown) becomes null."""
    return json.dumps(_known(document), indent=1, allow_nan=False) + "\n"


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------------------- Markdown


def number(value: float, figure: Figure) -> str:
    return "–" if math.isnan(value) else f"{value / figure.unit:.{figure.digits}f}"


def cell(spread: Document, figure: Figure) -> str:
    """``median (least–greatest)``."""
    if not spread["runs"]:
        return "–"
    if spread["runs"] == 1 or spread["low"] == spread["high"]:
        return number(spread["median"], figure)
    return f"{number(spread['median'], figure)} ({number(spread['low'], figure)}–{number(spread['high'], figure)})"


def ratio_cell(spread: Document) -> str:
    if not spread["runs"]:
        return "–"
    if spread["runs"] == 1 or f"{spread['low']:.3f}" == f"{spread['high']:.3f}":
        return f"{spread['median']:.3f}"
    return f"{spread['median']:.3f} ({spread['low']:.3f}–{spread['high']:.3f})"


def worst_cell(spread: Document) -> str:
    return "–" if not spread["runs"] or math.isnan(spread["worst"]) else f"{spread['worst']:.3f}"


def table(entry: Document) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a workload's table: each side, followed by its comparisons."""
    figures = figures_of(entry)
    heading, rows = [""], [[figure.name] for figure in figures]
    shown: set[str] = set()
    for pair in pairs(entry):
        for name in (pair.below, pair.above):
            if name not in shown:
                shown.add(name)
                heading.append(name)
                for row, figure in zip(rows, figures, strict=True):
                    row.append(cell(entry["summary"][name][figure.key], figure))
        heading += [pair.title, "worst"]
        for row, figure in zip(rows, figures, strict=True):
            spread = entry["ratios"][pair.label][figure.key]
            row += [ratio_cell(spread), worst_cell(spread)]
    return heading, rows


def headline(document: Document) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table over all workloads: each side over off, worst run in brackets."""
    shown = [figure for figure in FIGURES if figure.key in HEADLINE]
    heading = ["workload", *(f"{figure.name.partition(',')[0]}, on / off" for figure in shown)]
    heading += [*(f"{name}, on" for name in OVER_LEAST.values()), "answers identical"]
    rows = []
    for entry in document["workloads"]:
        for pair in pairs(entry):
            label = f"({entry['key']}) {entry['title']}"
            if pair.label != "on":
                label += f", {pair.label.removeprefix('on ')}" if pair.title == "on / off" else f": {pair.title}"
            row = [label]
            for figure in shown:
                spread = entry["ratios"][pair.label][figure.key]
                more = f" ({spread['worst']:.3g})" if spread["runs"] > 1 and not math.isnan(spread["worst"]) else ""
                row.append(f"{spread['median']:.3g}{more}" if spread["runs"] else "–")
            row += [_with_worst(entry["summary"][pair.above][key]) for key in OVER_LEAST]
            rows.append([*row, identity(entry)])
    return heading, rows


def _with_worst(spread: Document) -> str:
    """The median of a figure of which less is better, and the worst if different."""
    if not spread["runs"]:
        return "–"
    median, high = f"{spread['median']:.3f}", f"{spread['high']:.3f}"
    return median if high == median else f"{median} ({high})"


def identity(entry: Document) -> str:
    different = sum(run["different_answers"] for run in entry["runs"])
    asked = entry["requests"] * len(entry["runs"])
    return f"all {asked}" if not different else f"{asked - different} of {asked}"


def answers(entry: Document) -> list[str]:
    """Sentences on a workload's answers: how many are the same, and where others part."""
    return [
        f"Answers identical in all runs: {identity(entry)}.",
        *(f"{text[0].upper()}{text[1:]}." for text in parted.sentences(entry.get("differences", ()))),
    ]


def turns_table(entry: Document) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a chat's table by turn: medians over runs; TTFT for all sides."""
    heading = ["turn", "prompt tokens", "reused on decode", "MiB sent, off", "on", "lower bound"]
    heading += [f"TTFT p50, ms, {name}" for name in entry["variants"]]
    rows = []
    first = pairs(entry)[0]
    off, on = first.below, first.above
    for turn in range(len(entry["runs"][0]["rounds"])):
        of = {name: [run["rounds"][turn] for run in entry["runs"] if run["variant"] == name] for name in (off, on)}
        prompt = Spread.of([r["prompt_tokens"] for r in of[on]]).median
        reused = Spread.of([r["reused_tokens"] for r in of[on]]).median
        row = [str(turn + 1), f"{prompt:.0f}", f"{reused:.0f} ({reused / prompt:.0%})"]
        row += [f"{Spread.of([r['sent_bytes'] for r in of[name]]).median / 2**20:.1f}" for name in (off, on)]
        row.append(f"{of[on][0]['least_pages'] * entry['page_bytes'] / 2**20:.1f}")
        for name in entry["variants"]:
            ttft = [run["rounds"][turn]["ttft_p50_s"] for run in entry["runs"] if run["variant"] == name]
            row.append(f"{1e3 * Spread.of(ttft).median:.0f}")
        rows.append(row)
    return heading, rows


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(document: Document) -> str:
    """One line on machine, model and versions."""
    s = document["setting"]
    versions = {"SGLang": "sglang", "sglang-pd-radix": "sglang_pd_radix", "torch": "torch"}
    parts = [s["date"], s["machine"], *(f"{name} {s[key]}" for name, key in versions.items())]
    parts += [s["router"], f"{s['backend']} {s['backend_version']}".strip(), f"Python {s['python']}"]
    return ", ".join([*parts, f"{s['model']} in {s['dtype']} on {s['device']}", f"pages of {s['page_size']} tokens"])


def sizes_line(entry: Document) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in entry["sizes"].items() if value != "")
    return f"{entry['requests']} requests a run; {sizes}"


LEGEND = (
    "Cells: median (least–greatest) over the runs. On / off is the median of the ratios of neighbouring runs, so it is "
    "not the ratio of the medians beside it; worst is the least favourable of them (in brackets where a cell has two "
    "numbers). The lower bound is computed from the workload. –: not known; "
    f"a p99 needs at least {LEAST_FOR_P99} values."
)
_TURNS = "Runs of all sides took turns, {} of each; the first in odd runs was the last in even ones."


def markdown(document: Document) -> str:
    """The report as Markdown."""
    parts = ["# pd-radix bench", describe(document), f"    {document['setting']['command']}"]
    runs = document["setting"]["runs"]
    parts.append(f"{_TURNS.format(runs)} {LEGEND}")
    parts.append(markdown_table(*headline(document)))
    for entry in document["workloads"]:
        parts.append(f"## ({entry['key']}) {entry['title']}")
        parts.append(sizes_line(entry))
        parts.append(markdown_table(*table(entry)))
        turns = [turns_table(entry)] if entry["chat"] else []
        parts += [markdown_table(*one) for one in (compared.table(entry), *turns)]
        for title, heading, rows in breakdown.tables(entry):
            parts += [f"**{title}**", markdown_table(heading, rows)]
        parts += [*answers(entry), *breakdown.notes(entry)]
        parts += [f"**FAILED: {problem}**" for problem in entry["problems"]]
        parts += list(entry["notes"])
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------------- files


def write(document: Mapping[str, Any], text: str, out: Path, name: str) -> None:
    """Write ``document`` as JSON (null for unknown figures), and its ``text``."""
    write_whole(out / f"{name}.json", as_json(document))
    write_whole(out / f"{name}.md", text)
