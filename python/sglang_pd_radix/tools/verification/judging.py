"""Judges the answers of `pd-radix verify` against prefill's recomputation."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..rounding import MARGIN, Deviation, Limits, deviation, limit_of
from .asking import Run, Truth
from .kv_record import KvDifference, kv_difference
from .script import Wave

# Upper bounds of KV deviation relative to its size: of the limit, and without noise. Measured, see
# docs/evidence.md#verdicts-2026-11-23; another token's KV deviates by about 1.
KV_CEILINGS = {"float32": 0.01, "": 0.3}
KV_LEAST_LIMIT = 1e-4
# Failures reported singly for each part of a run.
MOST_TOLD = 8


@dataclass
class Part:
    """Findings of one part. ``failures`` make it FAILED; ``unknown``: why it could not be judged.

    left_out: it does not exist here.
    """

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    left_out: bool = False

    @property
    def result(self) -> str:
        if self.failures:
            return "FAILED"
        if self.unknown:
            return "not judged"
        return "n/a" if self.left_out else "ok" if self.lines else "not done"


@dataclass
class Verdict:
    """Findings by part: the rows of a table.

    found_by: worst findings by source: answers, KV, reuse.
    """

    setting: dict[str, Any]
    table: dict[str, Part] = field(default_factory=dict)
    found_by: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> Part:
        """The row of that name, added if missing."""
        return self.table.setdefault(name, Part())

    @property
    def lines(self) -> list[str]:
        return [f"{name}: {line}" for name, part in self.table.items() for line in part.lines]

    @property
    def failures(self) -> list[str]:
        return [failure for part in self.table.values() for failure in part.failures]

    @property
    def unknown(self) -> list[str]:
        return [reason for part in self.table.values() for reason in part.unknown]

    @property
    def word(self) -> str:
        """PASSED only if all parts were judged."""
        results = {part.result for part in self.table.values()}
        return "FAILED" if "FAILED" in results else "PASSED" if results <= {"ok", "n/a"} else "CANNOT BE JUDGED HERE"

    @property
    def sentence(self) -> str:
        """The verdict as one line."""
        named = [name for name, part in self.table.items() if part.result not in ("ok", "n/a")]
        return f"pd-radix verify: {self.word}" + (f": {'; '.join(named)}" if named else "")

    @property
    def text(self) -> str:
        """For terminals and reports: setting, table, and the verdict in the last line."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("part", no_wrap=True)
        table.add_column("result", no_wrap=True)
        table.add_column("what it means")
        for name, part in self.table.items():
            means = part.failures + part.unknown or part.lines
            table.add_row(Text(name), part.result, Text("\n".join(means)))
        # A file has no line width.
        width = shutil.get_terminal_size((120, 24)).columns
        console = Console(file=io.StringIO(), width=width, color_system=None)
        with console.capture() as shown:
            console.print(Text(", ".join(f"{name} {value}" for name, value in self.setting.items())), table)
        rows = [line.rstrip() for line in shown.get().splitlines()]
        return "\n".join([*rows, self.sentence])

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        keys = ("setting", "lines", "failures", "unknown", "found_by", "figures")
        table = [{"part": name, "result": part.result, **asdict(part)} for name, part in self.table.items()]
        return {**{key: getattr(self, key) for key in keys}, "table": table, "passed": self.word == "PASSED"}


@dataclass(frozen=True)
class Found:
    """One answer: its wave and number (from 1), its deviation from the score, and its KV's from prefill's.

    missing: ranks whose KV could not be compared; -1: of all ranks.
    """

    wave: str
    number: int
    deviation: Deviation
    kv: tuple[KvDifference, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.wave}, prompt {self.number}"


def findings(waves: Sequence[Wave], run: Run, truth: Truth, may_lack: int = 0) -> list[Found]:
    """Compare all answers of a run, and their KV, with prefill's recomputation.

    may_lack: tokens at the end of each that may have no KV, see `kv_difference`.
    """
    return list(_findings(waves, run, truth, may_lack))


def _findings(waves: Sequence[Wave], run: Run, truth: Truth, may_lack: int) -> Iterator[Found]:
    for wave, answers, records in zip(waves, run.answers, run.kv, strict=True):
        for number, (prompt, answer, ranks) in enumerate(zip(wave.prompts, answers, records, strict=True), 1):
            own = truth.kv.get((*prompt, *answer.tokens), {})
            both = sorted(ranks.keys() & own.keys())
            expected = {rank for record in (*ranks.values(), *own.values()) for rank in range(record.ranks)} or {-1}
            yield Found(
                wave.name,
                number,
                deviation(answer, truth.score(prompt, answer)),
                tuple(kv_difference(ranks[rank], own[rank], may_lack) for rank in both),
                tuple(sorted(expected - set(both))),
            )


@dataclass(frozen=True)
class Judge:
    """Limits for this machine. answers: of log-probabilities. kv_limit: of KV, relative to its size. kv_noise:
    deviation in runs without a cache; None if KV cannot be recorded."""

    answers: Limits
    kv_limit: float
    kv_noise: float | None

    @classmethod
    def of(cls, noise: Sequence[Found], dtype: str, has_kv: bool = True) -> Judge:
        """From answers of runs without a cache on decode."""
        ceiling = KV_CEILINGS.get(dtype.removeprefix("torch."), KV_CEILINGS[""])
        kv_noise = max((d.most for found in noise for d in found.kv), default=math.inf) if has_kv else None
        limit = min(ceiling, max(KV_LEAST_LIMIT, MARGIN * (kv_noise or 0)))
        return cls(Limits.of((found.deviation for found in noise), dtype), limit, kv_noise)

    def judge_noise(self, verdict: Verdict) -> None:
        """Check that rounding is small enough to detect faults."""
        part = verdict.part("rounding")
        part.lines.append("small enough to detect faults, as measured on decode without a cache")
        if self.answers.unjudgeable:
            part.unknown.append(self.answers.unjudgeable)
        if self.kv_noise is not None and not self.kv_noise <= self.kv_limit:
            part.unknown.append(
                f"KV that decode got without any cache differs by {self.kv_noise:.2g} of its size from what prefill "
                f"computes for the same tokens; above {self.kv_limit:.2g} a fault looks like rounding"
            )

    def judge(self, verdict: Verdict, found: Sequence[Found], what: str, same: int) -> None:
        """Judge one run with the flag. same: number of answers equal to the reference's."""
        self._judge_answers(verdict, found, what, same)
        if self.kv_noise is not None:
            self._judge_kv(verdict, found, what)

    def _judge_answers(self, verdict: Verdict, found: Sequence[Found], what: str, same: int) -> None:
        most, rms, behind = (max(getattr(f.deviation, name) for f in found) for name in ("most", "rms", "behind"))
        limit, noise = self.answers.held_to, self.answers.noise
        verdict.part(f"{what}, answers").lines.append(
            f"{len(found)} answers, each scored by prefill over the same tokens: log-probabilities are off by "
            f"at most {most:.2g} (limit {limit.most:.2g}; without a cache {noise.most:.2g}), in the root mean "
            f"square {rms:.2g} ({limit.rms:.2g}; {noise.rms:.2g}); no token is more than {behind:.2g} behind "
            f"the likeliest. {same} are the reference's, token for token"
        )
        verdict.figures[f"{what}, answers"] = {
            "asked": len(found),
            "same": same,
            "most": most,
            "rms": rms,
            "behind": behind,
            "limit": limit.most,
            "limit_rms": limit.rms,
        }
        wrong = [(f, self.answers.beyond(f.deviation)) for f in found]
        failures = [f"{what}, {f.name}: {why}; that is more than rounding" for f, why in wrong if why]
        _tell(verdict, "answers", what, failures)

    def _judge_kv(self, verdict: Verdict, found: Sequence[Found], what: str) -> None:
        assert self.kv_noise is not None
        limit = limit_of(self.kv_limit, self.kv_noise)
        compared = [d for f in found for d in f.kv]
        most = max((d.most for d in compared), default=math.inf)
        tokens = sum(d.tokens for d in compared)
        verdict.part(f"{what}, KV").lines.append(
            f"{tokens} tokens that the answers were made from, in every layer of full attention, are off "
            f"by at most {most:.2g} of their size from what prefill computes anew (limit {limit:.2g}; without a cache "
            f"{self.kv_noise:.2g})"
        )
        verdict.figures[f"{what}, kv"] = {"tokens": tokens, "most": most, "limit": limit}
        failures = []
        for f in found:
            failures += [
                f"{what}, {f.name}: the KV that decode has is not its tokens': {d} is off by {d.most:.2g} of its size"
                for d in f.kv
                if not d.most <= limit
            ]
            if f.missing:
                failures.append(f"{what}, {f.name}: its KV could not be compared, a worker left no record of it")
        _tell(verdict, "KV", what, failures)


def _tell(verdict: Verdict, by: str, what: str, failures: list[str]) -> None:
    if not failures:
        return
    verdict.found_by[by] = verdict.found_by.get(by, 0) + len(failures)
    part = verdict.part(f"{what}, {by}")
    part.failures += failures[:MOST_TOLD]
    if len(failures) > MOST_TOLD:
        part.failures.append(f"{what}: {len(failures) - MOST_TOLD} more of this kind")


def same_answers(reference: Run, run: Run) -> int:
    """Number of answers with equal tokens in both."""
    pairs = zip(reference.answers, run.answers, strict=True)
    return sum(a.tokens == b.tokens for one, other in pairs for a, b in zip(one, other, strict=True))


def judge_reuse(
    verdict: Verdict,
    waves: Sequence[Wave],
    reference: Run,
    run: Run,
    page_size: int,
    what: str = "cold cache",
    bigrams: bool = False,
) -> None:
    """Check that decode held the expected part of each prompt. bigrams: keys are token pairs (EAGLE)."""
    tokens = sum(sum(wave) for wave in run.held)
    prompts = sum(len(prompt) for wave in waves for prompt in wave.prompts)
    verdict.part(f"{what}, reuse").lines.append(
        f"decode held {tokens} of {prompts} prompt tokens ({tokens / prompts:.0%}), all that it must"
    )
    verdict.figures[f"{what}, reuse"] = {"held": tokens, "prompt": prompts}
    failures = []
    for i, (wave, held) in enumerate(zip(waves, run.held, strict=True)):
        for n, (least, tokens) in enumerate(zip(wave.least_held, held, strict=True)):
            if wave.follows:
                # Decode holds its own answer, and the prompt contains the reference's: equal up to where they part.
                common = _common(reference.answers[i - 1][n].tokens, run.answers[i - 1][n].tokens)
                if common is not None:
                    most = len(waves[i - 1].prompts[n]) + common
                    least = min(least, max(0, most - bigrams) // page_size * page_size)
            if run.computed and run.computed[i][n]:
                # Of a fully held prompt the last token is recomputed for the first output.
                least = min(least, (len(wave.prompts[n]) - 1) // page_size * page_size)
            if tokens < least:
                failures.append(f"{what}, {wave.name}, prompt {n + 1}: decode held {tokens} tokens, not {least}")
    _tell(verdict, "reuse", what, failures)


def _common(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Number of common leading tokens; None if the answers are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
