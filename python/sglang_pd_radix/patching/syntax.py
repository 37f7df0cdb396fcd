"""Parses source files, safely also in a process with threads and finalizers."""

from __future__ import annotations

import ast
import gc
import threading

_one_at_a_time = threading.Lock()


def parse(text: str | bytes, path: object = "<unknown>") -> ast.Module:
    """The syntax tree of a module's source.

    Python up to 3.11.7 keeps the recursion depth of the trees it builds in one variable per process. A finalizer during
    a garbage collection, or a thread that this lets run, may parse too (a log message with a traceback), which raises a
    SystemError (CPython issue 106905). So the collector is off meanwhile.

    Args:
        path: the file, for messages.

    Raises:
        SyntaxError: the source is not Python.
        ValueError: it has NULs.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text, str(path))
        finally:
            if collects:
                gc.enable()
