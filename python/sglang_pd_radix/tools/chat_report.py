"""The comparison of the runs of a chat, for a terminal and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from . import chat_beside, chat_local
from .chat_judge import MOST_OVER_LEAST, Comparison, ratio
from .chat_load import Workload
from .chat_run import Run, mib
from .workers import DECODE_COUNTERS, LOCAL_COUNTERS, PREFILL_COUNTERS


def print_report(comparison: Comparison, title: str, local: Comparison | None = None, beside: int = 0) -> None:
    """Print the table and the verdict to stdout.

    local: of the run in which decode computed short remainders. beside: clients that sent long prompts beside a chat.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)
    console.print()
    console.print(_table(comparison, title))
    for line in (*_lines(comparison), *(chat_local.lines(local) if local else ()), *_beside(comparison, local, beside)):
        console.print(Text(line, style="bold red" if line.startswith("FAILED") else ""), soft_wrap=True)


def _beside(comparison: Comparison, local: Comparison | None, clients: int) -> list[str]:
    off, on = comparison.off.beside_ttft_s, comparison.on.beside_ttft_s
    if off is None or on is None:
        return []
    return [chat_beside.line(clients, off, on, local.on.beside_ttft_s if local else None)]


def _table(comparison: Comparison, title: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    off, on = comparison.off, comparison.on
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE, show_footer=True)
    reused, prompts = on.total("reused_tokens"), on.total("prompt_tokens")
    for heading, footer in (
        ("turn", "all"),
        ("prompt tokens", f"{prompts}"),
        ("reused on decode", f"{reused} ({reused / prompts:.0%})"),
        ("MiB sent, off", mib(off.total("sent_bytes"))),
        ("on", mib(on.total("sent_bytes"))),
        ("off/on", f"{comparison.bytes_ratio:.2f}x"),
        ("TTFT, off", ""),
        ("on", ""),
        ("off/on", ""),
    ):
        table.add_column(heading, footer=Text(footer), justify="right", no_wrap=True)
    for number, (a, b) in enumerate(zip(off.turns, on.turns, strict=True), 1):
        table.add_row(
            f"{number}",
            f"{b.prompt_tokens}",
            f"{b.reused_tokens} ({b.reused_tokens / b.prompt_tokens:.0%})",
            mib(a.sent_bytes),
            mib(b.sent_bytes),
            f"{ratio(a.sent_bytes, b.sent_bytes):.2f}x",
            f"{a.ttft_s:.3f} s",
            f"{b.ttft_s:.3f} s",
            f"{ratio(a.ttft_s, b.ttft_s):.2f}x",
        )
    return table


def _lines(comparison: Comparison) -> list[str]:
    off, on = comparison.off, comparison.on
    answers = sum(len(turn.replies) for turn in on.turns)
    same = answers - len(comparison.differences)
    since = "from turn 2 on, " if len(on.turns) > 1 else ""
    lines = [
        f"KV sent:  {mib(off.total('sent_bytes'))} MiB off, {mib(on.total('sent_bytes'))} MiB on: "
        f"{comparison.bytes_ratio:.2f}x",
        f"          on is {comparison.over_least:.3f} times the least possible, {mib(comparison.least_bytes)} MiB",
    ]
    if since:
        lines += [
            f"          {since}{mib(comparison.later_sent)} MiB, {comparison.later_over_due:.3f} times the least "
            f"possible (at most {MOST_OVER_LEAST} is accepted)",
            f"          {mib(comparison.later('without_answers'))} MiB would be sent if decode kept prompts and no "
            f"answers, {mib(comparison.later('without_prompts'))} if it kept nothing",
        ]
    # Whose tree is over several kinds of KV, or with host memory, says less than that.
    pools = sum("size" in pool for run in (off, on) for pool in run.pools.values())
    sound = "sound" if not off.problems + on.problems else "NOT sound"
    lines += [
        f"TTFT:     {since}median {_spread(off)} off, {_spread(on)} on: {comparison.ttft_ratio:.2f}x",
        f"          in turn 1, the same work in both runs: {ratio(off.turns[0].ttft_s, on.turns[0].ttft_s):.2f}x",
        f"Answers:  {same} of {answers} identical with the flag off and on",
        f"KV pools: {sound} on {pools} workers after the chat (every page free or in the tree, no lock left)",
    ]
    lines += [f"          {line}" for line in comparison.differences]
    lines += [f"Note:     {note}" for note in comparison.notes]
    lines += [f"FAILED:   {failure}" for failure in comparison.failures]
    return lines


def _spread(run: Run) -> str:
    return f"{run.later_ttft_s:.3f} s ({min(run.later_ttfts_s):.3f} to {max(run.later_ttfts_s):.3f})"


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def as_document(
    comparison: Comparison, workload: Workload, setting: dict[str, Any], local: Comparison | None = None
) -> dict[str, Any]:
    """Everything that was measured, ready for JSON. local: as for `print_report`."""
    runs, third = {}, {"local": local.on} if local else {}
    for name, run in {"off": comparison.off, "on": comparison.on, **third}.items():
        turns = []
        for number, turn in enumerate(run.turns, 1):
            entry = asdict(turn)
            told = [vars(reply).items() for reply in turn.replies]
            entry["replies"] = [{k: v for k, v in reply if k not in ("text", "answer")} for reply in told]
            turns.append({"turn": number, "ttft_median_s": turn.ttft_s, **entry})
        names = (*PREFILL_COUNTERS, *DECODE_COUNTERS, *LOCAL_COUNTERS)
        totals = {key: run.total(key) for key in names} | {"ttft_median_from_turn_2_s": run.later_ttft_s}
        runs[name] = {"start_s": run.start_s, "turns": turns, "totals": totals, "pools": run.pools}
        runs[name]["beside_long_prompts_ttft_median_s"] = run.beside_ttft_s
    return {
        "setting": setting,
        "workload": asdict(workload),
        "runs": runs,
        "page_bytes": comparison.page_bytes,
        "least_bytes": comparison.least_bytes,
        "pages_of_turns": [asdict(turn) for turn in comparison.bounds],
        "sent_bytes_off_over_on": _finite(comparison.bytes_ratio),
        "sent_bytes_on_over_least": _finite(comparison.over_least),
        "sent_bytes_on_over_least_from_turn_2": _finite(comparison.later_over_due),
        "ttft_off_over_on": comparison.ttft_ratio,
        "identical": not comparison.differences,
        "differences": comparison.differences,
        "rounding_limit": comparison.rounding_limit,
        "failures": comparison.failures + (local.failures if local else []),
        "notes": comparison.notes + (local.notes if local else []),
    }
