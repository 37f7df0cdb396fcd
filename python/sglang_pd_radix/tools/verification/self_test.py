"""``pd-radix verify --self-test``: injects faults one at a time, and checks that the verdict finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

from . import faults
from .check import Check
from .judging import Verdict

# The corrupted prompt in the wave of new ones: 300 tokens and a page. And a short one for temporary faults, which have
# to show in the answer alone.
TARGET, SHORT_TARGET = 3, 1
PAGE = 1
# Tokens of a prompt sent before each: source of wrong KV, and of its pages' earlier content.
ANOTHER = 2000


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault. by: parts of the verdict that found it. not_made: why it could not be injected.

    problems: leaks after its run; a fault of KV causes none.
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
    """Inject each fault into a run from a cold cache, and judge it like any run."""
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
    """Report the outcomes; missed faults are failures."""
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
    """Further environment of the worker with the flag."""
    return {faults.ALLOWED: "1"}
