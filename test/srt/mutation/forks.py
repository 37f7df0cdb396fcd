"""Runs tests in forked children of one pytest session, on functions whose code was changed in that child alone."""

from __future__ import annotations

import ast
import builtins
import gc
import json
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from sglang_pd_radix.patching import syntax

from .changes import PATCHES, Marker, Mutant, Mutator

# A test may take this long in a mutant, in seconds: so much more than it took, and so many times as long.
SLACK_S, TIMES = 15.0, 8.0
MOST_BYTES = 5 * 2**30


def functions_of_patches() -> dict[tuple[str, str, int], list[FunctionType]]:
    """Every function in memory that a patch file defined, by (path, name, first line)."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for one in gc.get_objects():
        code = one.__code__ if type(one) is FunctionType else None
        # Lambdas of one line cannot be told apart.
        if code and code.co_filename.startswith(f"{PATCHES}/") and code.co_name != "<lambda>":
            found.setdefault((code.co_filename, code.co_name, code.co_firstlineno), []).append(one)
    return found


def codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes(const)


def give(tree: ast.AST, path: Path, functions: dict[tuple[str, str, int], list[FunctionType]]) -> int:
    """Give the functions of a patch file the code that this tree has for them; how many are changed by that."""
    changed = 0
    for code in codes(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)):
        for function in functions.get((str(path), code.co_name, code.co_firstlineno), ()):
            if code != function.__code__ and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
                changed += 1
    return changed


# ---- running ----


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Forks:
    """A pytest plugin that, in place of running the collected tests, runs some of them again and again in children."""

    def __init__(self, work: Callable[[Forks], None]) -> None:
        self.work, self.items, self.functions = work, {}, {}  # type: ignore[var-annotated]
        self.told: Callable[[pytest.TestReport], None] = lambda report: None
        self.why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.told(report)
        if report.failed:
            self.why = report.longreprtext.splitlines()[-1]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # What conftest.py froze is not told by `gc.get_objects`.
        self.functions = functions_of_patches()
        gc.collect()
        gc.freeze()
        self.work(self)
        return True

    def child(self, act: Callable[[], Any], limit_s: float) -> Any:
        """What ``act`` gives in a forked child, as JSON; None when that died or took longer than the limit."""
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "answer.json")
            pid = os.fork()
            if not pid:
                try:
                    self._become_child(folder)
                    answer.write_text(json.dumps(act()))
                except BaseException:
                    answer.write_text(json.dumps({"outcome": "broken", "error": traceback.format_exc()}))
                finally:
                    os._exit(0)
            end = time.monotonic() + limit_s
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > end or resident_bytes(pid) > MOST_BYTES:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.005)
            try:
                os.killpg(pid, signal.SIGKILL)  # What its tests had started.
            except ProcessLookupError:
                pass
            return json.loads(answer.read_text()) if answer.exists() and answer.stat().st_size else None

    @staticmethod
    def _become_child(folder: str) -> None:
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        tempfile.tempdir = os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = folder

    def run(self, names: list[str], each: Callable[[str, str, float], bool]) -> None:
        """Run these tests in this process; ``each`` is told name, outcome and seconds, and says whether to go on."""
        for i, name in enumerate(names):
            outcomes, start = [], time.monotonic()
            self.told = lambda report, outcomes=outcomes: outcomes.append(  # type: ignore[misc]
                ("timeout" if "Timeout (>" in report.longreprtext else report.outcome)
                if report.failed
                else report.outcome
            )
            after = self.items[names[i + 1]] if i + 1 < len(names) else None
            self.items[name].config.hook.pytest_runtest_protocol(item=self.items[name], nextitem=after)
            outcome = next((o for o in ("timeout", "failed", "skipped") if o in outcomes), "passed")
            if not each(name, outcome, time.monotonic() - start):
                return


def make_map(forks: Forks, path: Path) -> None:
    """Write for each test how it went, its seconds, and the statements of patch files that it executed."""
    names = list(forks.items)
    done = [json.loads(line)["test"] for line in path.read_text().splitlines()] if path.exists() else []
    names = [name for name in names if name not in set(done)]

    def act() -> None:
        reached: set[tuple[str, int]] = set()
        builtins.__reached__ = lambda module, line: reached.add((module, line))  # type: ignore[attr-defined]
        for file in {Path(key[0]) for key in forks.functions}:
            module = str(file.relative_to(PATCHES))
            give(Marker(module).visit(syntax.parse(file.read_bytes())), file, forks.functions)

        def each(name: str, outcome: str, seconds: float) -> bool:
            with path.open("a") as out:
                lines: dict[str, list[int]] = {}
                for module, line in sorted(reached):
                    lines.setdefault(module, []).append(line)
                print(
                    json.dumps(
                        {"test": name, "outcome": outcome, "s": round(seconds, 3), "why": forks.why, "lines": lines}
                    ),
                    file=out,
                )
                forks.why = ""
            reached.clear()
            return True

        forks.run(names, each)

    print(forks.child(act, 3600) or "", end="")
    print(f"{len(path.read_text().splitlines())} of {len(forks.items)} tests in {path}")


def read_map(path: Path) -> list[dict[str, Any]]:
    """The tests that passed, the last word about each, quickest first."""
    tests = {line["test"]: line for line in map(json.loads, path.read_text().splitlines())}
    return sorted((t for t in tests.values() if t["outcome"] == "passed"), key=lambda t: t["s"])


def of_each(tests: list[dict[str, Any]], cases: int, most_s: float) -> list[dict[str, Any]]:
    """The first tests, at least one: so many cases of each test function, and of so many seconds in all."""
    chosen: list[dict[str, Any]] = []
    count: dict[str, int] = {}
    left = most_s
    for test in tests:
        function = test["test"].partition("[")[0]
        count[function] = count.get(function, 0) + 1
        if count[function] <= cases and (left >= test["s"] or not chosen):
            chosen.append(test)
            left -= test["s"]
    return chosen


def run_mutants(forks: Forks, chosen: list[Mutant], path: Path, out: Path, cases: int, most_s: float) -> None:
    """Write for each mutant how it ended. cases, most_s: see `of_each`; seconds are those of the map."""
    tests = [t for t in read_map(path) if t["test"] in forks.items]
    sound: dict[str, bool] = {}

    def outcome_of(mutant: Mutant | None, names: list[str], limits: dict[str, float]) -> dict[str, Any]:
        def act() -> dict[str, Any]:
            if mutant is not None:
                tree = Mutator(mutant.module, mutant.index).visit(syntax.parse((PATCHES / mutant.module).read_bytes()))
                if not give(tree, PATCHES / mutant.module, forks.functions):
                    return {"outcome": "not applied"}
            ended: dict[str, Any] = {"outcome": "survived"}
            for name in names:
                forks.items[name].add_marker(pytest.mark.timeout(limits[name], method="signal"), append=False)

            def each(name: str, outcome: str, seconds: float) -> bool:
                if outcome in ("failed", "timeout"):
                    ended.update(outcome="killed" if outcome == "failed" else "timed out", test=name)
                return ended["outcome"] == "survived"

            forks.run(names, each)
            return ended

        return forks.child(act, 30 + sum(limits.values())) or {"outcome": "timed out", "test": "the whole"}

    for number, mutant in enumerate(chosen):
        reaching = [t for t in tests if mutant.statement in t["lines"].get(mutant.module, ())]
        hits = of_each(reaching, cases, most_s)
        names = [t["test"] for t in hits]
        limits = {t["test"]: SLACK_S + TIMES * t["s"] for t in hits}
        result: dict[str, Any] = {"outcome": "not reached"}
        while names:
            result = outcome_of(mutant, names, limits)
            test = result.get("test")
            if result["outcome"] not in ("killed", "timed out") or test not in limits:
                break
            # A test that fails without the change too, when it runs alone, says nothing.
            if test not in sound:
                sound[test] = outcome_of(None, [test], limits)["outcome"] == "survived"
            if sound[test]:
                break
            names.remove(test)
            result = {"outcome": "survived"}
        with out.open("a") as file:
            print(
                json.dumps(asdict(mutant) | {"tests": len(names), "left_out": len(reaching) - len(hits)} | result),
                file=file,
            )
        print(
            f"{number + 1}/{len(chosen)} {mutant.module}:{mutant.line} {result['outcome']}: {mutant.change}", flush=True
        )
