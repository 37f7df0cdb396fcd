"""Options whose value is a string of options for another program, such as ``--decode-args "--page-size 16"``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from sglang_pd_radix.errors import PdRadixError

ARGS_OPTIONS = ("--common-args", "--prefill-args", "--decode-args", "--router-args", "--pegaflow-args")


def join_values(args: Sequence[str]) -> list[str]:
    """``["--decode-args", "--x"]`` as ``["--decode-args=--x"]``, up to a ``--``.

    argparse would take the value for another option; joined by "=" it cannot.
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


def split_options(text: str, option: str) -> list[str]:
    """The words of a quoted option string, as a shell would split it. Raises PdRadixError naming ``option``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PdRadixError(f'{option} "{text}" cannot be split into words ({error}): check its quotes') from None
