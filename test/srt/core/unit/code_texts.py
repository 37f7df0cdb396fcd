"""The texts in a tree of Python files, with a hole for what is put in at run time."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_pd_radix.patching import syntax

HOLE = "\0"
_PERCENT = re.compile(r"%[-+ #0]*[\d.*]*[sdrgfxi]")


@dataclass(frozen=True)
class Raised:
    """A text that an error is raised with."""

    path: Path
    line: int
    text: str


def text_of(node: ast.AST) -> str | None:
    """The text of an expression; what is not known is a hole, and None where there is no text at all."""
    if isinstance(node, ast.Constant):
        return _PERCENT.sub(HOLE, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


def texts(*roots: Path) -> set[str]:
    """Every text below ``roots`` that is no docstring."""
    found, silent = set(), set()
    for _, node in _nodes(*roots):
        if isinstance(node, ast.Expr):
            silent.add(node.value)
        elif node not in silent and (text := text_of(node)) is not None:
            found.add(text)
    return found


def raised(*roots: Path) -> list[Raised]:
    """Every text that an error is raised with directly."""
    found = []
    for path, node in _nodes(*roots):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = text_of(node.exc.args[0])
            if text is not None:
                found.append(Raised(path, node.lineno, text))
    return found


def handed(names: Collection[str], *roots: Path) -> list[Raised]:
    """Every text that a function of one of these names is called with."""
    found = []
    for path, node in _nodes(*roots):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            said = (text_of(argument) for argument in node.args)
            found += [Raised(path, node.lineno, text) for text in said if text is not None]
    return found


def assigned(name: str, *roots: Path) -> list[Raised]:
    """Every text that a variable of this name is given."""
    found = []
    for path, node in _nodes(*roots):
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            text = text_of(node.value)
            if text is not None:
                found.append(Raised(path, node.lineno, text))
    return found


def returned(functions: Collection[str], *roots: Path) -> list[Raised]:
    """Every text that a function of one of these names returns."""
    found = []
    for path, node in _nodes(*roots):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            for inner in ast.walk(node):
                text = text_of(inner.value) if isinstance(inner, ast.Return) and inner.value is not None else None
                if text:
                    found.append(Raised(path, inner.lineno, text))
    return found


def _nodes(*roots: Path) -> Iterator[tuple[Path, ast.AST]]:
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            for node in ast.walk(syntax.parse(path.read_text(encoding="utf-8"), path)):
                yield path, node


def says(text: str, message: str) -> bool:
    """Whether ``text`` can be the message, whose ``...`` stand for anything."""
    at = 0
    for part in (part.strip() for part in message.split("...")):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
