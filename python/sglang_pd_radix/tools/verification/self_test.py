"""``pd-radix verify --self-test``: would the verdict find what is wrong? Faults are made on purpose, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

from . import faults
from .check import Check
from .judging import Verdict

# The prompt whose KV is spoilt, in the wave of new ones: 300 tokens and a page. And one that is short, where what is
# wrong for a while has to show in the answer alone.
TARGET, SHORT_TARGET = 3, 1
PAGE = 1
# Tokens of a prompt that is asked before each: of another prompt's KV, and what its pages had before.
ANOTHER = 2000


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. by: which parts of the verdict found it. not_made: why it could not be made.

    problems: what the pools held after its run and should not; a fault of KV is none of the books.
    """

    kind: str
    by: tuple[str, ...] = ()
    not_made: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def missed(self) -> bool:
        return not self.by and not self.not_made

    def __str__(self) -> str:
        found = "found by " + " and ".join(self.by) if self.by else f"NOT MADE: {self.not_made or ''}"
        return f"{found} ({faults.KINDS[self.kind]})"


def run(check: Check, say: Callable[[str], None]) -> list[Outcome]:
    """Make each fault in a run from a cold cache, and judge it as any run."""
    if check.unreadable:
        raise PdRadixError(
            f"--self-test spoils KV of full attention, and does not know a {check.unreadable}: leave it out"
        )
    outcomes = []
    for kind in faults.KINDS:
        if kind == "one rank" and check.info["tp_size"] < 2:
            outcomes.append(Outcome(kind, not_made="there is one rank; give -- --tp-size 2"))
            continue
        say(f"flag on, with a fault: {kind}")
        outcomes.append(_one(check, kind))
    return outcomes


def _one(check: Check, kind: str) -> Outcome:
    target = check.waves[0].prompts[SHORT_TARGET if kind == "a page for a while" else TARGET]
    directory = check.on_records.directory
    check.dirty_on(ANOTHER)
    faults.Order(kind, target, PAGE).give(directory)
    try:
        answered = check.ask_on()
    finally:
        faults.withdraw(directory)
    if not faults.done(directory):
        raise PdRadixError(
            f"--self-test: no decode worker has made the fault of {kind}. With DP ranks, its prompt may have gone to "
            "another one than the prompt before it: leave DP out"
        )
    problems = tuple(check.problems_on())
    verdict = Verdict({})
    check.judge_on(verdict, {kind: answered})
    return Outcome(kind, tuple(verdict.found_by), problems=problems)


def judge(verdict: Verdict, outcomes: list[Outcome]) -> None:
    """Tell what was found, and fail for what was not."""
    verdict.figures["self-test"] = [{"fault": o.kind, "found_by": o.by, "not_made": o.not_made} for o in outcomes]
    for o in outcomes:
        part = verdict.part(f"fault: {o.kind}")
        part.left_out = bool(o.not_made)
        if o.missed:
            part.failures.append(f"self-test: {o.kind} was not found")
        else:
            part.lines.append(str(o))
        part.failures += [f"self-test: {o.kind}: {problem}" for problem in o.problems]


def environment() -> dict[str, str]:
    """What the worker with the flag needs in its environment, beside that of its records."""
    return {faults.ALLOWED: "1"}
