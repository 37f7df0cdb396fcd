"""The register of all changes to the engine, and the pins that guard it.

It parses the source text of both sides with ``ast`` and does not import the engine. So it takes a second on any
machine, also for an engine that does not start.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader, syntax

PINS = Path(__file__).with_name("pins.json")

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Replacement:
    """One change or addition. ``file`` begins with ``extras/NAME`` for an extra's.

    ``kind``: ``extends`` (a subclass takes the class's name), ``wraps`` (calls what it replaces), ``replaces`` (does
    not) or ``adds``. ``why``: first paragraph of the docstring. ``upstream``: its ``Upstream:`` line, or that of the
    class or file. ``pin``: the engine source it relies on (``module:qualname``).
    """

    file: str
    line: int
    module: str
    name: str
    kind: str
    why: str
    upstream: str
    pin: str | None = None

    @property
    def extra(self) -> str:
        """Its extra; "" for the core."""
        top, _, rest = self.file.partition("/")
        return rest.partition("/")[0] if top == "extras" else ""

    @property
    def undocumented(self) -> bool:
        """Whether a required docstring is missing: only added functions and methods need none."""
        return not self.why and (self.kind != "adds" or self.name == "*")


@dataclass(frozen=True)
class Drift:
    """A violated pin. ``problem``: ``missing``, ``changed``, ``gone`` or ``stale``."""

    pin: str
    problem: str

    def __str__(self) -> str:
        return {
            "missing": f"{self.pin} has no pin: run `pd-radix patches --write-pins`",
            "changed": f"{self.pin} differs from what the patch set was written against",
            "gone": f"{self.pin} is not in this engine any more",
            "stale": f"{self.pin} is pinned but not replaced: run `pd-radix patches --write-pins`",
        }[self.problem]


class _Source:
    """Syntax trees of a package ``sglang``, by dotted module name; the first folder that has a module counts."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self._modules: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        if name not in self._modules:
            stems = [folder.joinpath(*name.split(".")[1:]) for folder in self.folders]
            paths = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py")]
            found = [path for path in paths if path.is_file()]
            known = name.split(".")[0] == "sglang" and found
            self._modules[name] = _Module(name, found[0], self) if known else None
        return self._modules[name]


class _Module:
    def __init__(self, name: str, path: Path, source: _Source) -> None:
        self.name, self.path, self.source = name, path, source
        try:
            text = path.read_text(encoding="utf-8")
            self.tree = syntax.parse(text, path)
        except SyntaxError as error:
            raise PdRadixError(f"{path}, line {error.lineno}: {error.msg}") from error
        except ValueError as error:
            # Not UTF-8, or with NULs.
            raise PdRadixError(f"{path}: {error}") from error
        self.lines = text.splitlines()
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.definitions: dict[str, list[ast.stmt]] = {}
        for node in _statements(self.tree.body):
            for defined in _names(node):
                self.definitions.setdefault(defined, []).append(node)
        self.imports = dict(self._imports())

    def _imports(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Local name -> (module, name in it); (module, "") for the module itself."""
        for node in _statements(self.tree.body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        yield alias.asname, (alias.name, "")
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.package.split(".")
                    base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
                for alias in node.names:
                    yield alias.asname or alias.name, (base, alias.name)

    def references(self, module: str, name: str, attribute: str = "") -> set[str]:
        """Expressions by which this file can name ``module.name`` (or ``module.name.attribute``): through the module,
        an import, or a module-level name bound to one of these."""
        known = {
            f"{local}.{name}" for local, origin in self.imports.items() if ".".join(filter(None, origin)) == module
        }
        known |= {local for local, origin in self.imports.items() if origin == (module, name)}
        known |= self._bound_to(known)
        if attribute:
            known = {f"{expression}.{attribute}" for expression in known}
            known |= self._bound_to(known)
        return known

    def _bound_to(self, expressions: set[str]) -> set[str]:
        assigned = {name: getattr(nodes[-1], "value", None) for name, nodes in self.definitions.items()}
        return {name for name, value in assigned.items() if value is not None and ast.unparse(value) in expressions}

    def find(self, name: str) -> tuple[_Module, list[ast.stmt]] | None:
        """The definition of a top-level name; follows imports within the tree."""
        if name in self.definitions:
            return self, self.definitions[name]
        if name in self.imports:
            base, item = self.imports[name]
            origin = self.source.module(base)
            if origin is not None and origin is not self and item:
                return origin.find(item)
        return None

    def klass(self, name: str) -> tuple[_Module, ast.ClassDef] | None:
        found = self.find(name)
        classes = [node for node in found[1] if isinstance(node, ast.ClassDef)] if found else []
        return (found[0], classes[-1]) if found and classes else None

    def bases(self, node: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
        for base in node.bases:
            found = self.klass(base.id) if isinstance(base, ast.Name) else None
            if found is not None and found[1] is not node:
                yield found

    def method(self, node: ast.ClassDef, name: str) -> tuple[str, str] | None:
        """(pin, source text) of a method, from the class or its bases."""
        own = [item for item in _statements(node.body) if isinstance(item, _Function) and item.name == name]
        if own:
            return f"{self.name}:{node.name}.{name}", self.text(own)
        for module, base in self.bases(node):
            found = module.method(base, name)
            if found is not None:
                return found
        return None

    def text(self, nodes: Sequence[ast.stmt]) -> str:
        """Source of the definitions, decorators included, dedented, without trailing whitespace."""
        parts = []
        for node in nodes:
            first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
            part = textwrap.dedent("\n".join(self.lines[first - 1 : node.end_lineno]))
            parts.append("\n".join(line.rstrip() for line in part.split("\n")))
        return "\n".join(parts)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, including those under ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield node


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (*_Function, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def replacements(engine: Path | None = None, root: Path | None = None) -> list[Replacement]:
    """All changes and additions, in the order of the files.

    ``engine``: the engine's package directory (default: the installed one). ``root``: the directory of the patch tree
    (default: :func:`loader.patch_root`). Raises PdRadixError for a missing engine or a malformed file.
    """
    return [row for row, _ in _scan(engine, root)]


def pins(engine: Path | None = None, root: Path | None = None, path: Path = PINS) -> dict[Path, dict[str, str]]:
    """The pins of the installed engine's replaced source: name -> sha256 of its text.

    By the file that records them: ``path`` for the core, and one in each extra's folder.
    """
    return _pins(_scan(engine, root), root, path)


def _pins(rows: list[tuple[Replacement, str | None]], root: Path | None, path: Path) -> dict[Path, dict[str, str]]:
    found: dict[Path, dict[str, str]] = {path: {}}
    for row, text in rows:
        if row.pin and text is not None:
            file = loader.patch_roots([row.extra], root)[1] / PINS.name if row.extra else path
            found.setdefault(file, {})[row.pin] = _digest(text)
    return found


def check_pins(engine: Path | None = None, root: Path | None = None, path: Path = PINS) -> list[Drift]:
    """Violated pins of the installed engine; empty if it is the engine that was patched."""
    rows = _scan(engine, root)
    added = {f"{row.module}:{row.name}" for row, _ in rows if row.kind == "adds"}
    drift: set[Drift] = set()
    for file, current in _pins(rows, root, path).items():
        recorded: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        drift |= {Drift(pin, "missing") for pin in current if pin not in recorded}
        drift |= {Drift(pin, "changed") for pin, digest in current.items() if recorded.get(pin, digest) != digest}
        drift |= {Drift(pin, "gone" if pin in added else "stale") for pin in recorded if pin not in current}
    return sorted(drift, key=lambda item: (item.pin, item.problem))


def write_pins(engine: Path | None = None, root: Path | None = None, path: Path = PINS) -> int:
    """Pin the installed engine; returns the number of pins."""
    found = pins(engine, root, path)
    for file, of_file in found.items():
        file.write_text(json.dumps(of_file, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sum(map(len, found.values()))


def as_markdown(rows: list[Replacement]) -> str:
    """The register as a page in Markdown."""
    parts = [
        "# What the patch set changes in the engine",
        "Made by `pd-radix patches`. *Extends*: a subclass takes the class's name. *Wraps*: calls what it replaces. "
        "*Replaces*: does not.",
        "*Until* names the change of the engine that makes a file unnecessary, or says that none is known. A number is "
        "of sgl-project/sglang; *merged* is on its main branch, *open* and *closed* are not.",
    ]
    for file, group in groupby((row for row in rows if row.name != "*"), key=lambda row: row.file):
        found = list(group)
        changes = [row for row in found if row.kind != "adds"]
        own = len(found) - len(changes)
        upstream = Counter(row.upstream for row in found).most_common(1)[0][0]
        cells = [
            (f"`{row.name}`", row.kind, row.why if row.upstream == upstream else f"{row.why} {row.upstream}")
            for row in changes
        ]
        parts += [f"## `{file}`", f"Until: {upstream}" if upstream else "", _table(("Name", "Kind", "Why"), cells)]
        parts.append(f"And {own} {'part' if own == 1 else 'parts'} of its own." if own else "")
    if modules := [row for row in rows if row.name == "*"]:
        table = _table(("File", "What it is", "Until"), [(f"`{r.file}`", r.why, r.upstream) for r in modules])
        parts += ["## New modules", table]
    return "\n\n".join(part for part in parts if part)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _scan(engine: Path | None, root: Path | None) -> list[tuple[Replacement, str | None]]:
    engine = engine or loader.engine_root()
    if engine is None:
        raise PdRadixError(f"the engine is not installed: pip install sglang=={loader.ENGINE_VERSION}")
    root = root or loader.patch_root()
    roots, theirs = loader.patch_roots(loader.known_extras(root), root), _Source(engine)
    ours = {place: _Source(place / "sglang", root / "sglang") for place in roots}
    rows: list[tuple[Replacement, str | None]] = []
    for file in loader.patch_files(engine, roots):
        patch = ours[file.root].module(file.module)
        assert patch is not None
        rows += _scan_file(patch, theirs.module(file.module) if file.overlay else None, root)
    return rows


def _scan_file(patch: _Module, engine: _Module | None, root: Path) -> Iterator[tuple[Replacement, str | None]]:
    why, upstream = _docstring(patch.tree)
    here = Replacement(
        file=patch.path.relative_to(root).as_posix(),
        line=1,
        module=patch.name,
        name="*",
        kind="adds",
        why=why,
        upstream=upstream,
    )
    if engine is None:
        yield here, None
        return
    for name in _all(patch):
        found = patch.find(name)
        if found is None and name not in patch.imports:
            raise PdRadixError(f"{patch.path}: __all__ names {name}, which the file does not define")
        owner, node = (found[0], found[1][-1]) if found else (patch, None)
        row = _describe(here, node, name, owner is patch)
        if isinstance(node, ast.ClassDef):
            yield from _scan_class(row, owner, node, patch, engine)
        elif name not in engine.definitions:
            yield replace(row, kind="adds"), None
        else:
            wraps = node is not None and _calls(node, name, owner.references(engine.name, name))
            row = replace(row, kind="wraps" if wraps else "replaces", pin=f"{engine.name}:{name}")
            yield row, engine.text(engine.definitions[name])


def _scan_class(
    row: Replacement, owner: _Module, node: ast.ClassDef, patch: _Module, engine: _Module
) -> Iterator[tuple[Replacement, str | None]]:
    found = engine.klass(row.name)
    if found is None:
        yield replace(row, kind="adds"), None
        return
    module, original = found
    if not _inherits(owner, node, row.name, engine.name):
        yield replace(row, kind="replaces", pin=f"{module.name}:{original.name}"), module.text([original])
        return
    yield replace(row, kind="extends"), None
    seen: set[str] = set()
    for part, klass in [(owner, node), *_mixins(owner, node)]:
        for item in _statements(klass.body):
            if not isinstance(item, _Function) or item.name in seen:
                continue
            seen.add(item.name)
            one = replace(_describe(row, item, f"{row.name}.{item.name}", part is patch), kind="adds")
            target = module.method(original, item.name)
            if target is None:
                yield one, None
            else:
                references = part.references(engine.name, original.name, item.name)
                kind = "wraps" if _calls(item, item.name, references) else "replaces"
                yield replace(one, kind=kind, pin=target[0]), target[1]


def _mixins(owner: _Module, node: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
    """Our own bases of a patch class: their methods also precede the engine's."""
    for module, base in owner.bases(node):
        yield module, base
        yield from _mixins(module, base)


def _inherits(owner: _Module, node: ast.ClassDef, name: str, engine: str) -> bool:
    references = owner.references(engine, name)
    if any(ast.unparse(base) in references for base in node.bases):
        return True
    return any(_inherits(module, base, name, engine) for module, base in owner.bases(node))


def _calls(node: ast.stmt, name: str, references: set[str]) -> bool:
    """Whether a definition uses what it replaces, through ``super().name`` or one of ``references``."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.value, ast.Call):
            if isinstance(part.value.func, ast.Name) and part.value.func.id == "super":
                return True
        if isinstance(part, (ast.Attribute, ast.Name)) and ast.unparse(part) in references:
            return True
    return False


def _describe(parent: Replacement, node: ast.stmt | None, name: str, same_file: bool) -> Replacement:
    documented = isinstance(node, (*_Function, ast.ClassDef))
    why, upstream = _docstring(node) if documented else (parent.why, "")  # type: ignore[arg-type]
    line = node.lineno if node is not None and same_file else parent.line
    return replace(parent, line=line, name=name, why=why, upstream=upstream or parent.upstream)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, str]:
    """(first paragraph, ``Upstream:`` paragraph) of a docstring, each on one line."""
    text = ast.get_docstring(node) or ""
    upstream = re.search(r"^Upstream:(.*(?:\n.*\S.*)*)", text, re.MULTILINE)
    if upstream:
        text = text[: upstream.start()] + text[upstream.end() :]
    first = text.strip().split("\n\n")[0]
    return " ".join(first.split()), " ".join(upstream.group(1).split()) if upstream else ""


def _all(patch: _Module) -> list[str]:
    nodes = patch.definitions.get("__all__", [])
    try:
        names = ast.literal_eval(nodes[-1].value)  # type: ignore[attr-defined]
    except (IndexError, AttributeError, ValueError) as error:
        raise PdRadixError(f"{patch.path}: __all__ must be a plain list of the names this file changes") from error
    return list(names)
