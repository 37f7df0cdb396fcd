"""A worker's options, parsed from the source of engine and patch set.

An import of the engine takes 8 s. Parsing the source allows wrong options to be refused before anything starts.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader
from sglang_pd_radix.patching.syntax import parse

from .arguments import did_you_mean

# Relative to the engine's package and to the patch trees: names of some options, and all declarations.
_FILES = ("srt/mem_cache/cache_support.py", "srt/server_args.py")
_HELP = "python -m sglang.launch_server --help"
# Types whose values are checked. Others are the engine's own, or accept anything.
_TYPES = {"int": int, "float": float}
# The patch set extends its choices.
_MORE_CHOICES = "--load-balance-method"


class Parser(argparse.ArgumentParser):
    """Parses another program's options: raises PdRadixError, without this program's usage."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise PdRadixError(message)


class _Given(argparse.Action):
    """Keeps options as given, in order."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append the option and its values."""
        words = values if isinstance(values, list) else [] if values is None else [values]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), str(option_string), *words])


def accept(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` accept the engine's options too, as ``engine_given``.

    An unknown option ends the program with status 2 and a one-line suggestion.
    """
    own = {name for action in parser._actions for name in action.option_strings}
    for names, declared in _declared():
        if free := [name for name in names if name not in own]:
            parser.add_argument(
                *free,
                action=_Given,
                nargs=declared.get("nargs"),
                dest="engine_given",
                default=[],
                help=argparse.SUPPRESS,
            )
    parse_known = parser.parse_known_args

    def parse_all(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = parse_known(args, namespace)
        if unknown:
            names = {name for action in parser._actions for name in action.option_strings}
            more = f"{parser.prog} --help and {_HELP}"
            parser.exit(2, f"pd-radix: {_unknown(unknown, names, f'{parser.prog} or of the engine', more)}\n")
        return found, unknown

    parser.parse_known_args = parse_all  # type: ignore[method-assign,assignment]


def check(options: Sequence[str], where: str) -> None:
    """Raise PdRadixError for an option or value in ``options`` that a worker refuses.

    where: their origin, for the message.
    """
    if not _declared():
        raise PdRadixError(f"the engine is not installed: pip install sglang=={loader.ENGINE_VERSION}")
    parser = Parser(add_help=False)
    for names, declared in _declared():
        parser.add_argument(*names, action=_Given, dest="given", default=[], **declared)
    try_all(parser, options, where, "the engine", _HELP)


def try_all(parser: Parser, options: Sequence[str], where: str, whose: str, more: str) -> None:
    """Raise PdRadixError if ``parser``, with the options of ``whose``, does not accept all ``options``.

    where: their origin. more: where valid ones are listed; for the message.
    """
    try:
        _, unknown = parser.parse_known_args(options)
    except PdRadixError as error:
        raise PdRadixError(f"{where}: {error}") from None
    if unknown:
        names = {name for action in parser._actions for name in action.option_strings}
        raise PdRadixError(f"{where}: {_unknown(unknown, names, whose, more)}")


def _unknown(words: Sequence[str], names: Collection[str], whose: str, more: str) -> str:
    """The message for unknown ``words``."""
    first = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    return f"{first} is no option of {whose}{did_you_mean(first, names) or f': see {more}'}"


def _declared() -> list[tuple[list[str], dict[str, Any]]]:
    """Each option's names, and `add_argument` keywords for its values. Empty without an engine.

    Raises PdRadixError if SGLANG_PD_RADIX_EXTRAS names an unknown extra.
    """
    engine, roots = loader.engine_root(), loader.patch_roots(loader.extras())
    return _declared_below(engine, *(root / "sglang" for root in roots)) if engine else []


@cache
def _declared_below(*roots: Path) -> list[tuple[list[str], dict[str, Any]]]:
    found: list[tuple[list[str], dict[str, Any]]] = []
    for root in roots:
        constants: dict[str, str] = {}
        for path in (root / name for name in _FILES):
            if path.is_file():
                found += _of_file(path, constants)
    return found


def _of_file(path: Path, constants: dict[str, str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Options declared in a file. constants: names that stand for options; the file's own are added."""
    tree = parse(path.read_bytes(), path)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            constants |= {ast.unparse(target): str(statement.value.value) for target in statement.targets}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            words = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            names = [
                str(name.value) if isinstance(name, ast.Constant) else constants.get(ast.unparse(name), "")
                for name in call.args
            ]
            if ast.unparse(words.get("action", ast.Constant(""))).endswith("BooleanOptionalAction"):
                names += [f"--no-{name.removeprefix('--')}" for name in names]
            if names := [name for name in names if name.startswith("--")]:
                yield names, _values(names, words)


def _values(names: Sequence[str], words: Mapping[str, ast.expr]) -> dict[str, Any]:
    """The number of an option's values, and its choices, as far as the declaration shows."""
    found: dict[str, Any] = {}
    if "nargs" in words:
        found["nargs"] = ast.literal_eval(words["nargs"])
    elif "action" in words:
        # Engine options with an action and without "nargs" are switches.
        found["nargs"] = 0
    if "type" in words:
        found["type"] = _TYPES.get(ast.unparse(words["type"]), str)
    # A named list may grow during the engine's import.
    if isinstance(words.get("choices"), ast.List | ast.Tuple) and _MORE_CHOICES not in names:
        found["choices"] = ast.literal_eval(words["choices"])
    return found
