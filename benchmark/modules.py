"""Who imports whom among the modules of the patch set, by floors: a module stands above all that it imports. An extra
counts as one.

    python benchmark/modules.py            # writes the list in docs/architecture.md
    python benchmark/modules.py --check    # only says whether it is what the code says

Imports for types alone do not count, those inside functions do. A patch file imports the engine's module of its own
name: that is the engine, and no edge here. `test/srt/tools/unit/test_modules.py` checks the page, and finds circles.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sglang_pd_radix.patching import loader, syntax

ROOT = Path(__file__).resolve().parents[1]
CODE = ROOT / "python" / "sglang" / "srt"
PAGE = ROOT / "docs" / "architecture.md"
MARK, END = "<!-- modules: made by `python benchmark/modules.py` -->", "<!-- end of modules -->"

Imports = Mapping[str, frozenset[str]]


class Circle(Exception):
    """Modules that import each other, in the order of the imports."""


def of_checkout() -> dict[str, frozenset[str]]:
    """What each module and each extra of this checkout imports of the others."""
    engine, python = loader.engine_root(), CODE.parents[1]
    assert engine is not None
    files = loader.patch_files(engine, loader.patch_roots(loader.known_extras(python), python))
    return imports(CODE, (file for file in files if file.root != python))


def imports(code: Path, extras: Iterable[loader.PatchFile] = ()) -> dict[str, frozenset[str]]:
    """What each module imports of the others, both by their paths below ``code`` without ``.py``.

    ``extras`` are the files of extras; one of these is to the others ``extras/NAME``.
    """
    means: dict[str, str] = {}
    named: dict[str, set[str]] = {}
    files = [(path, _name(path, code), "") for path in sorted(code.rglob("*.py"))]
    of_extras = [(file.path, file.root, not file.overlay) for file in extras]
    files += [(path, _name(path, root / "sglang" / "srt"), f"extras/{root.name}") for path, root, _ in of_extras]
    # Who imports what an extra lays over the engine's imports the engine's.
    engines = {path for path, _, new in of_extras if not new}
    for path, name, extra in files:
        if path not in engines:
            means[name] = extra or name
        package = "/".join(name.split("/")[: None if path.name == "__init__.py" else -1])
        tree = syntax.parse(path.read_text(encoding="utf-8"), path)
        named.setdefault(extra or name, set()).update(_named(tree, package))
    return {name: frozenset(means[it] for it in of if it in means) - {name} for name, of in named.items()}


def _name(path: Path, code: Path) -> str:
    relative = path.relative_to(code)
    return (relative.parent if path.name == "__init__.py" else relative.with_suffix("")).as_posix()


def _named(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that a file may mean by its imports, as paths below ``sglang/srt``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (_below(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = ["sglang", "srt", *package.split("/")]
                module = ".".join([*above[: len(above) - node.level + 1], *filter(None, [module])])
            # Of a package either a module in it is meant or, where there is none of the name, what it has itself.
            yield from (_below(f"{module}.{alias.name}") for alias in node.names)
            yield _below(module)
        else:
            yield from _named(node, package)


def _below(module: str) -> str:
    """The path below ``sglang/srt`` of one of its modules; "" for any other."""
    return module.removeprefix("sglang.srt.").replace(".", "/") if module.startswith("sglang.srt.") else ""


def floors(graph: Imports) -> list[list[str]]:
    """The modules by floors: on the first who imports none, on each next one who imports some of the one below it.

    Raises Circle.
    """
    height: dict[str, int] = {}

    def climb(name: str, way: tuple[str, ...]) -> int:
        if name in way:
            raise Circle(" -> ".join((*way[way.index(name) :], name)))
        if name not in height:
            height[name] = 1 + max((climb(other, (*way, name)) for other in sorted(graph[name])), default=-1)
        return height[name]

    for name in sorted(graph):
        climb(name, ())
    return [sorted(name for name in graph if height[name] == floor) for floor in range(max(height.values()) + 1)]


# ------------------------------------------------------------------------------------------------------------ the page


def as_list(graph: Imports) -> str:
    """The floors from the top, a line each, with folders said once."""
    lines = []
    for number, floor in reversed(list(enumerate(floors(graph)))):
        folders: dict[str, list[str]] = {}
        for name in floor:
            folder, _, module = name.rpartition("/")
            folders.setdefault(folder, []).append(module)
        parts = []
        for folder, names in folders.items():
            some = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
            parts.append(f"{folder}/{some}" if folder else some)
        text = f"{number:2d}  " + "  ".join(parts)
        lines += textwrap.wrap(text, 128, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def with_list(page: str, graph: Imports) -> str:
    """The page with its list made anew."""
    before, found, rest = page.partition(MARK)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"there are no lines {MARK} and {END}, between which the list belongs")
    return f"{before}{MARK}\n\n```text\n{as_list(graph)}\n```\n\n{END}{after}"


def main() -> int:
    """Write or check the page. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    try:
        made = with_list(old, of_checkout())
    except (Circle, ValueError) as error:
        print(f"modules: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.check:
        if made != old:
            print(f"{PAGE.relative_to(ROOT)} is not what `python benchmark/modules.py` makes")
        return int(made != old)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
