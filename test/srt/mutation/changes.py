"""The small changes of a patch file that `mutate.py` makes, one a mutant, and marks that tell what is reached."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pd_radix.patching import syntax

PATCHES = Path(__file__).resolve().parents[3] / "python" / "sglang"

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Div: ast.Mult,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: in which file and function, at which line of which statement, its number in the file, and what."""

    module: str
    function: str
    line: int
    statement: int
    index: int
    change: str


class Mutator(ast.NodeTransformer):
    """Counts the places that can be changed, in the order of the source, and changes the one of number ``target``."""

    def __init__(self, module: str, target: int = -1) -> None:
        self.module, self.target, self.found = module, target, []  # type: ignore[var-annotated]
        self.functions: list[str] = []
        self.statement = 0

    def offer(self, node: ast.AST, change: str, replace: Callable[[], Any]) -> Any:
        """The node of this place: as it is, or replaced when this is the place to change."""
        index = len(self.found)
        name = ".".join(self.functions)
        self.found.append(Mutant(self.module, name, node.lineno, self.statement, index, change))  # type: ignore[attr-defined]
        return ast.fix_missing_locations(ast.copy_location(replace(), node)) if index == self.target else node

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return self.visit_definition(node)
        if isinstance(node, ast.stmt):
            if not self.inside_function(node) or is_log(node):
                return node
            self.statement = node.lineno
        if isinstance(node, (ast.JoinedStr, ast.arguments)):
            return node
        place = self.statement
        kind = type(node).__name__
        node = getattr(self, "change_" + kind, lambda given: given)(node)
        if isinstance(node, ast.Raise):
            return self.removal(node)
        node = self.generic_visit(node)
        self.statement = place
        return node

    def inside_function(self, node: ast.stmt) -> bool:
        return bool(self.functions) and self.functions[-1][0] != "<"

    def visit_definition(self, node: Any) -> Any:
        is_class = isinstance(node, ast.ClassDef)
        if is_class and any(not name.startswith("<") for name in self.functions):
            return node
        self.functions.append(f"<{node.name}>" if is_class else node.name)
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        node.body = [first] * documented + [self.visit(one) for one in node.body[documented:]]
        self.functions.pop()
        return node

    def removal(self, node: ast.stmt) -> Any:
        """Out of the way rather than gone, so that the function has the same free variables and stays a generator."""
        text = "remove: " + ast.unparse(node).splitlines()[0][:70]
        return self.offer(node, text, lambda: ast.If(ast.Constant(False), [node], []))

    def change_Expr(self, node: ast.Expr) -> Any:
        return self.removal(node) if isinstance(node.value, ast.Call) else node

    def change_Assign(self, node: ast.Assign) -> Any:
        return self.removal(node) if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)) else node

    def change_AugAssign(self, node: ast.AugAssign) -> Any:
        other = COMPUTED.get(type(node.op))
        if other is None:
            return self.removal(node)
        text = f"{ast.unparse(node)[:60]}: {type(node.op).__name__} -> {other.__name__}"
        return self.offer(node, text, lambda: ast.AugAssign(node.target, other(), node.value))

    def change_Delete(self, node: ast.Delete) -> Any:
        return self.removal(node)

    def change_Continue(self, node: ast.Continue) -> Any:
        return self.removal(node)

    def change_Break(self, node: ast.Break) -> Any:
        return self.removal(node)

    def change_Return(self, node: ast.Return) -> Any:
        if node.value is None or isinstance(node.value, ast.Constant):
            return node
        nothing = ast.BoolOp(ast.And(), [ast.Constant(None), node.value])
        return self.offer(node, f"return None, not {ast.unparse(node.value)[:60]}", lambda: ast.Return(nothing))

    def negated(self, node: Any) -> Any:
        if isinstance(node.test, (ast.Compare, ast.BoolOp)):
            return node
        text = f"negate: {ast.unparse(node.test)[:60]}"
        bare = node.test.operand if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not) else None
        node.test = self.offer(node.test, text, lambda: bare or ast.UnaryOp(ast.Not(), node.test))
        return node

    change_If = change_While = change_IfExp = negated

    def change_Compare(self, node: ast.Compare) -> Any:
        for i, op in enumerate(node.ops):
            other = COMPARED[type(op)]
            text = f"{ast.unparse(node)[:60]}: {type(op).__name__} -> {other.__name__}"
            swapped = [*node.ops[:i], other(), *node.ops[i + 1 :]]
            node = self.offer(node, text, lambda n=node, s=swapped: ast.Compare(n.left, s, n.comparators))
        return node

    def change_BoolOp(self, node: ast.BoolOp) -> Any:
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        text = f"{ast.unparse(node)[:60]}: {'and -> or' if other is ast.Or else 'or -> and'}"
        return self.offer(node, text, lambda: ast.BoolOp(other(), node.values))

    def change_BinOp(self, node: ast.BinOp) -> Any:
        other = COMPUTED.get(type(node.op))
        if other is None or isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return node
        text = f"{ast.unparse(node)[:60]}: {type(node.op).__name__} -> {other.__name__}"
        return self.offer(node, text, lambda: ast.BinOp(node.left, other(), node.right))

    def change_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bool):
            return self.offer(node, f"{value} -> {not value}", lambda: ast.Constant(not value))
        if isinstance(value, int):
            return self.offer(node, f"{value} -> {value + 1}", lambda: ast.Constant(value + 1))
        return node

    def change_Call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in CALLED:
            return node
        text = f"{ast.unparse(node)[:60]}: {name} -> {CALLED[name]}"
        other = ast.Name(CALLED[name], ast.Load())
        return self.offer(node, text, lambda: ast.Call(other, node.args, node.keywords))

    def change_Slice(self, node: ast.Slice) -> Any:
        for side in ("lower", "upper"):
            bound = getattr(node, side)
            if bound is not None and not isinstance(bound, ast.Constant):
                text = f"{side} bound of [{ast.unparse(node)[:50]}] + 1"
                setattr(node, side, self.offer(bound, text, lambda b=bound: ast.BinOp(b, ast.Add(), ast.Constant(1))))
        return node


def is_log(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(("logger.", "warn_once(", "print("))


def mutants(module: str) -> list[Mutant]:
    mutator = Mutator(module)
    mutator.visit(syntax.parse((PATCHES / module).read_bytes()))
    return mutator.found


class Marker(ast.NodeTransformer):
    """Puts a call before every statement of a function that tells that it is reached."""

    def __init__(self, module: str) -> None:
        self.module, self.depth = module, 0

    def visit(self, node: ast.AST) -> Any:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        self.depth += inside
        node = self.generic_visit(node)
        self.depth -= inside
        if not isinstance(node, ast.stmt) or not self.depth:
            return node
        call = f"__reached__({self.module!r}, {node.lineno})"  # type: ignore[attr-defined]
        mark = syntax.parse(call).body[0]
        for one in ast.walk(mark):
            ast.copy_location(one, node)
        return [mark, node]
