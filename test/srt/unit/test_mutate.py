"""The mutation tester changes one thing at a time, nothing that is only said, and sees which statements are reached."""

from __future__ import annotations

import ast
import builtins
import json

import mutate
import pytest
from mutation import changes
from mutation.forks import codes

from sglang_pd_radix.patching import syntax

SOURCE = '''
LIMIT = 3

def decide(free, need, log=False):
    """Texts and defaults stay."""
    logger.info("asked for %d", need + 1)
    if free < need or not need:
        raise ValueError(f"{need + 1} do not fit")
    left = free - need
    for step in range(left):
        if step == 2:
            continue
        told.append(step)
    return max(left, 1), told[left:]

class Queue:
    most = 5

    def push(self, one):
        self.count += 1
        self.last = one
'''
CHANGES = {
    7: ["free < need or not need: or -> and", "free < need: Lt -> LtE"],
    8: ["remove: raise ValueError(f'{need + 1} do not fit')"],
    9: ["free - need: Sub -> Add"],
    11: ["step == 2: Eq -> NotEq", "2 -> 3"],
    12: ["remove: continue"],
    13: ["remove: told.append(step)"],
    14: [
        "return None, not (max(left, 1), told[left:])", "max(left, 1): max -> min", "1 -> 2",
        "lower bound of [left:] + 1",
    ],
    20: ["self.count += 1: Add -> Sub", "1 -> 2"],
    21: ["remove: self.last = one"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "PATCHES", tmp_path)
    (tmp_path / "module.py").write_text(SOURCE)


def test_every_place_is_found_once_and_texts_are_left():
    found: dict[int, list[str]] = {}
    for mutant in changes.mutants("module.py"):
        found.setdefault(mutant.line, []).append(mutant.change)
        assert mutant.statement == mutant.line
    assert found == CHANGES
    assert [m.index for m in changes.mutants("module.py")] == list(range(15))
    assert {m.function for m in changes.mutants("module.py")} == {"decide", "<Queue>.push"}


def test_a_mutant_differs_in_one_function_and_from_every_other():
    seen = set()
    original = {code.co_name: code for code in codes(compile(SOURCE, "f", "exec"))}
    for mutant in changes.mutants("module.py"):
        tree = changes.Mutator("module.py", mutant.index).visit(syntax.parse(SOURCE))
        made = {code.co_name: code for code in codes(compile(ast.fix_missing_locations(tree), "f", "exec"))}
        changed = {name for name in made if made[name] != original[name]} - {"Queue"}
        assert changed == {mutant.function.split(".")[-1]}, mutant
        seen.add(ast.unparse(tree))
    assert len(seen) == 15


def test_again_draws_from_what_was_not_killed(tmp_path, monkeypatch):
    """It once drew first, and then looked which of those had survived: mostly none."""
    names = ["module.py"]
    survivors = {3, 11}
    results = tmp_path / "results.jsonl"
    lines = [
        {"module": "module.py", "index": i, "outcome": "survived" if i in survivors else "killed"} for i in range(15)
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed in range(5):
        assert {mutant.index for mutant in mutate.drawn(names, 2, seed, results)} == survivors
        assert len(mutate.drawn(names, 1, seed, results)) == 1
        assert len(mutate.drawn(names, 4, seed)) == 4
    assert [mutant.index for mutant in mutate.drawn(names, 99, 1)] == list(range(15))


def test_marks_tell_what_is_reached(monkeypatch):
    reached = []
    monkeypatch.setattr(builtins, "__reached__", lambda module, line: reached.append(line), raising=False)
    tree = ast.fix_missing_locations(changes.Marker("module.py").visit(syntax.parse(SOURCE)))
    names = {"told": [], "logger": type("Silent", (), {"info": lambda *args: None})}
    exec(compile(tree, "f", "exec"), names)
    assert reached == []
    assert names["decide"](3, 2) == (1, [])
    assert reached == [5, 6, 7, 9, 10, 11, 13, 14]
