"""Shared parts of command lines: one-line errors, options in strings, and hiding of secrets."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_pd_radix.errors import PdRadixError

ARGS_OPTIONS = ("--prefill-args", "--decode-args", "--router-args", "--pegaflow-args")
# Engine options with secret values.
_SECRET = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_VARIABLE = re.compile(r"(?i)\w*(key|token|secret|password)(_\w*)?")
# Options whose value is a command line; that of --compare has a name and a colon before it.
_LINES = ("--on", "--compare")


class Parser(argparse.ArgumentParser):
    """Reports an error and its remedy in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with 2."""
        self.exit(2, f"{self.prog}: {message}{'' if message.endswith('?') else ';'} see {self.prog} --help\n")

    def unknown(self, word: str) -> NoReturn:
        """`error` for an unknown word."""
        name = word.partition("=")[0]
        engines = any(action.dest == "engine_options" for action in self._actions)
        behind = " (options of the engine go behind --)" if engines else ""
        self.error(f"unknown argument {name}{behind}{did_you_mean(name, self._option_string_actions)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``: did you mean ...?`` with the most similar word of ``known``; "" without one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def add_log_dir(container: argparse._ActionsContainer) -> None:
    """Declare ``--log-dir``."""
    container.add_argument(
        *("--work-dir", "--log-dir"),
        dest="log_dir",
        type=Path,
        metavar="DIR",
        help="where logs go (default: a new temporary directory)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Declare the options by which `operate.reading.addresses` finds a deployment's workers."""
    group = parser.add_argument_group("workers", "Name them, or who knows them.")
    group.add_argument("worker", nargs="*", metavar="HOST:PORT", help="prefill and decode workers")
    group.add_argument("--gateway", metavar="URL", help="ask this gateway for the workers (smg, sglang-router)")
    group.add_argument("--deployment", metavar="FILE", help="the workers of pd-radix up --json FILE")


def join_values(args: Sequence[str]) -> list[str]:
    """``["--decode-args", "--x"]`` as ``["--decode-args=--x"]``, up to a ``--``.

    argparse would take the value for another option.
    """
    joined: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            return [*joined, arg, *rest]
        if arg in ARGS_OPTIONS:
            value = next(rest, None)
            joined.append(arg if value is None else f"{arg}={value}")
        else:
            joined.append(arg)
    return joined


def keep_rest(parser: argparse.ArgumentParser, dest: str) -> None:
    """Have ``parser`` keep the words that it does not know, as ``dest``, in their order."""
    parse_known = parser.parse_known_args

    def parse_all(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, rest = parse_known(args, namespace)
        setattr(found, dest, [word for word in rest if word != "--"])
        return found, []

    # What an option of the engine begins with may be one of ours.
    parser.allow_abbrev = False
    parser.parse_known_args = parse_all  # type: ignore[method-assign,assignment]


def split_options(text: str, option: str) -> list[str]:
    """Split a quoted option string as a shell would. Raises PdRadixError naming ``option``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PdRadixError(f'{option} "{text}" cannot be split into words ({error}): check its quotes') from None


def hidden(words: Sequence[str]) -> list[str]:
    """A command line without secrets, and with the last part of paths only."""
    shown: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if shown and shown[-1] in _SECRET:
            shown.append("...")
        elif equals and _SECRET_VARIABLE.fullmatch(name):
            shown.append(f"{name}=...")
        elif name in _SECRET:
            shown.append(f"{name}=..." if equals else name)
        elif shown and _is_line(shown[-1]):
            shown.append(_hidden_line(word))
        elif _is_line(name) and equals:
            shown.append(f"{name}={_hidden_line(value)}")
        elif word.startswith("/"):
            shown.append(Path(word).name)
        else:
            shown.append(f"{name}={Path(value).name}" if value.startswith("/") else word)
    return shown


def _is_line(option: str) -> bool:
    """Whether its value is a command line; also for abbreviations that argparse accepts."""
    return len(option) > len("--") and any(name.startswith(option) for name in _LINES)


def _hidden_line(line: str) -> str:
    """Hides secrets in engine options that are one word of a command, after a side's name if there is one."""
    side = re.match(r"[a-z][a-z0-9-]*:|", line)
    named = side[0] if side else ""
    try:
        return named + shlex.join(hidden(shlex.split(line.removeprefix(named))))
    except ValueError:
        return "..."
