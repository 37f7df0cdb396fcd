"""No file, class or function that a reader cannot hold in mind at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sglang_pd_radix.patching import syntax

ROOT = Path(__file__).parents[4]
FILES = [path for folder in ("python", "benchmark", "test") for path in sorted((ROOT / folder).rglob("*.py"))]
# Test worlds: a scheduler's parts share one state, and `main` is a script.
LARGER = {
    "test/srt/core/unit/decode_world.py",
    "test/srt/core/unit/overlapped_loop.py",
    "test/srt/pegaflow_host/one_scheduler.py",
}
# Lines, the signature, decorators and docstring included. Of a kernel the signature is not: it has an argument a line,
# and a kernel that is cut in two is another one to the compiler.
FILE, CLASS, FUNCTION = 600, 250, 70


def definitions(tree: ast.AST) -> Iterator[tuple[ast.stmt, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node, CLASS
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, FUNCTION


def too_long(text: str) -> list[str]:
    """What is longer in a file of this text than it may be, by line and name."""
    lines = text.count("\n")
    found = [f"the file has {lines} lines, {FILE} are allowed"] if lines > FILE else []
    for node, most in definitions(syntax.parse(text)):
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)])  # type: ignore[attr-defined]
        if any(ast.unparse(item) == "triton.jit" for item in node.decorator_list):  # type: ignore[attr-defined]
            first = node.body[0].lineno  # type: ignore[attr-defined]
        size = node.end_lineno - first + 1  # type: ignore[operator]
        if size > most:
            found.append(f"line {node.lineno}: {node.name} has {size} lines, {most} are allowed")  # type: ignore[attr-defined]
    return found


def test_nothing_is_too_long():
    each = {path.relative_to(ROOT).as_posix(): too_long(path.read_text(encoding="utf-8")) for path in FILES}
    found = {path: what for path, what in each.items() if what}
    assert {*found} == LARGER, found
    assert not any("the file" in one for path in LARGER for one in found[path])


def test_what_is_too_long_is_found():
    body = "    x = 1\n"
    assert too_long(f"def f():\n{body * (FUNCTION - 1)}") == []
    assert too_long(f"@d\ndef f():\n{body * (FUNCTION - 1)}") == ["line 2: f has 71 lines, 70 are allowed"]
    kernel = "@triton.jit\ndef k(\n    a,\n    b,\n):\n"
    assert too_long(kernel + body * FUNCTION) == []
    assert too_long(kernel + body * (FUNCTION + 1)) == ["line 2: k has 71 lines, 70 are allowed"]
    assert too_long(f"class C:\n{body * CLASS}") == ["line 1: C has 251 lines, 250 are allowed"]
    assert too_long("\n" * (FILE + 1)) == ["the file has 601 lines, 600 are allowed"]
