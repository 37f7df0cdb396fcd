"""Who imports whom among the modules of the patch set, by floors: a module stands above all that it imports. An extra
counts as one.

    python benchmark/modules.py            # writes docs/report/modules.svg and the list in docs/architecture.md
    python benchmark/modules.py --check    # only says whether they are what the code says

Imports for types alone do not count, those inside functions do. A patch file imports the engine's module of its own
name: that is the engine, and no edge here. `test/srt/unit/test_modules.py` checks both pages, and finds circles.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from sglang_pd_radix.patching import loader, syntax

ROOT = Path(__file__).resolve().parents[1]
CODE = ROOT / "python" / "sglang" / "srt"
PICTURE = ROOT / "docs" / "report" / "modules.svg"
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


# ------------------------------------------------------------------------------------------------------- the two pages


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


#: The columns of the picture: folders, and their colours. What is in none of them is in the last.
_COLUMNS = {
    "managers": "#d9ead3",
    "disaggregation": "#cfe2f3",
    "disaggregation/common": "#9fc5e8",
    "disaggregation/nixl": "#b4a7d6",
    "disaggregation/mooncake": "#d5a6bd",
    "mem_cache": "#fff2cc",
    "layers": "#f9cb9c",
    "extras": "#ead1dc",
    "": "#eeeeee",
}
_WIDTH, _HEIGHT, _GAP, _LEFT, _TOP = 196, 20, 10, 40, 40


def as_svg(graph: Imports) -> str:
    """The floors as a picture, the top one first, a column for each folder; lines from modules to what they import."""
    place, labels, y = {}, [], _TOP
    for number, floor in reversed(list(enumerate(floors(graph)))):
        labels.append((number, y + 15))
        filled = dict.fromkeys(_COLUMNS, 0)
        for name in floor:
            column = _column(name)
            x = _LEFT + [*_COLUMNS].index(column) * (_WIDTH + _GAP)
            place[name] = (x, y + filled[column] * (_HEIGHT + 4))
            filled[column] += 1
        y += max(filled.values()) * (_HEIGHT + 4) + 3 * _GAP
    width = _LEFT + len(_COLUMNS) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{y}" fill="white"/>',
    ]
    for i, folder in enumerate(_COLUMNS):
        x = _LEFT + i * (_WIDTH + _GAP)
        parts.append(f'<text x="{x}" y="24" font-size="13" fill="#444">{escape(folder or "other")}</text>')
    parts += [_line(place[name], place[other]) for name in sorted(graph) for other in sorted(graph[name])]
    parts += [f'<text x="8" y="{at}" font-size="14" fill="#666">{number}</text>' for number, at in labels]
    parts += [_box(name, *at, graph[name]) for name, at in place.items()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _column(name: str) -> str:
    folder = name.rpartition("/")[0]
    while folder not in _COLUMNS:
        folder = folder.rpartition("/")[0]
    return folder


def _line(above: tuple[int, int], below: tuple[int, int]) -> str:
    start = f"M{above[0] + _WIDTH // 2} {above[1] + _HEIGHT}"
    return f'<path d="{start} L{below[0] + _WIDTH // 2} {below[1]}" stroke="#888" stroke-width="0.5" opacity="0.6"/>'


def _box(name: str, x: int, y: int, imported: frozenset[str]) -> str:
    column = _column(name)
    shown = name.removeprefix(f"{column}/")
    shown = shown if len(shown) <= 32 else "…" + shown[-31:]
    title = f"{name} imports {', '.join(sorted(imported)) or 'none of these'}"
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="{_COLUMNS[column]}" stroke="#666" '
        f'stroke-width="0.5"/><text x="{x + 5}" y="{y + 14}">{escape(shown)}</text></g>'
    )


def with_list(page: str, graph: Imports) -> str:
    """The page with its list made anew."""
    before, found, rest = page.partition(MARK)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"there are no lines {MARK} and {END}, between which the list belongs")
    return f"{before}{MARK}\n\n```text\n{as_list(graph)}\n```\n\n{END}{after}"


def main() -> int:
    """Write or check the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    args = parser.parse_args()
    graph = of_checkout()
    try:
        made = {PICTURE: as_svg(graph), PAGE: with_list(PAGE.read_text(encoding="utf-8"), graph)}
    except (Circle, ValueError) as error:
        print(f"modules: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    old = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        print("\n".join(f"{path.relative_to(ROOT)} is not what `python benchmark/modules.py` makes" for path in old))
        return 1 if old else 0
    for path in old:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
