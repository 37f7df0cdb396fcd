"""Conversations for a storm, whose turns are short and long by turns, and what decode and prefill made of them.

A decode worker that computes short turns itself leaves its prefill without them, and a long turn makes prefill read
them from decode. Each prompt is all that was said before it, so the right answers are asked for turn by turn. Each time
the storm comes round, its clients give another ``extra_key``: nobody has a page of that, and the answers are the same.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_pd_radix.tools.bench import workload
from sglang_pd_radix.tools.cluster import Cluster, Process, http

from . import truth
from .traffic import WORDS, Ask
from .truth import Truth

# Reads in a storm from which on it says something of them.
ENOUGH = 20
LOCAL, READ = "sglang:decode_local_prefills_total", "sglang:prefill_reads_total"
COUNTERS = (LOCAL, READ, "sglang:prefill_read_tokens_total")
# So that a stopped worker holds up nobody's look at the others for long.
LOOK_S = 1.0


def of_engine_alone(
    model: str, conversations: int, turns: int, clients: int, log_dir: Path, options: Sequence[str],
    on_progress: Any = None,
) -> tuple[list[Ask], Truth]:  # fmt: skip
    """The requests, all of a turn before those of the next, and the right answers. Raises PdRadixError."""
    sizes = workload.AlternatingChat(clients=conversations, turns=turns, document=96, question=24, answer=12, long=160)
    asks: list[Ask] = []

    def talk(engine: Cluster) -> Truth:
        said: dict[int, tuple[int, ...]] = {}
        found = Truth()
        for part in sizes.make("j", workload.Tokens(WORDS, 0)).rounds:
            new = [Ask((*said.get(one.group, ()), *one.ids), one.answer, one.group) for one in part]
            answers = truth.ask(engine, new, clients)
            said |= {one.conversation: (*one.ids, *answers.answers[i]) for i, one in enumerate(new)}
            found.add(answers, len(asks))
            asks.extend(new)
        return found

    return asks, truth.asked_alone(model, talk, log_dir, options, on_progress)


class Counted:
    """Counters of workers, summed over all their lives; what a killed one counted after the last look is lost."""

    def __init__(self) -> None:
        self._of_life: dict[tuple[str, int], dict[str, float]] = {}

    def look(self, process: Process) -> None:
        pid = process.pid
        status, content = http(process.url + "/metrics", timeout=LOOK_S)
        # A worker that was started again meanwhile has answered for its own life.
        if status != 200 or process.pid != pid:
            return
        found = self._of_life.setdefault((process.name, pid), {})
        found |= read(content.decode(errors="replace"))

    def since(self, before: dict[str, float]) -> dict[str, float]:
        return {name: value - before.get(name, 0.0) for name, value in self.sums().items()}

    def sums(self) -> dict[str, float]:
        total: collections.Counter[str] = collections.Counter()
        for found in self._of_life.values():
            total.update(found)
        return dict(total)


def read(page: str) -> dict[str, float]:
    """The counters of one page of /metrics; those with an outcome by ``name outcome``. Of what is no page: nothing."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in COUNTERS:
                    name = f"{sample.name} {sample.labels.get('outcome', '')}".strip()
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError:
        return {}
    return found


def told(counts: dict[str, float]) -> str:
    """What was counted, in a line."""
    outcomes = ", ".join(
        f"{int(value)} {name.partition(' ')[2]}" for name, value in sorted(counts.items()) if name.startswith(READ)
    )
    return (
        f"decode computed {int(counts.get(LOCAL, 0))} prompts itself; reads of prefill: {outcomes or 'none'}, "
        f"{int(counts.get(COUNTERS[2], 0))} tokens"
    )


def not_judged(counts: dict[str, float], reads: bool) -> list[str]:
    """What the storm was to show and did not. reads: whether prefill was to read."""
    count = int(sum(value for name, value in counts.items() if name.startswith(READ)))
    if reads and count < ENOUGH:
        return [f"reading from decode under fire: {count} reads, and {ENOUGH} are needed"]
    return []


def key(number: int, asks: int) -> str:
    """The ``extra_key`` of client ``number``, of whom ``asks`` come before the first request comes round again."""
    return f"round {number // asks}"
