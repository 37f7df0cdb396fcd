"""Syntax trees of source files, also in a process that does other things."""

from __future__ import annotations

import ast
import gc
import threading

_one_at_a_time = threading.Lock()


def parse(text: str | bytes, path: object = "<unknown>") -> ast.Module:
    """The syntax tree of a module's source.

    Python up to 3.11.7 counts the depth of the trees that it builds once for the process: a finalizer that the garbage
    collector runs meanwhile (a pending task's writes a log message, and a traceback in it is parsed), or a thread that
    it lets in, makes that a SystemError (CPython issue 106905). So none is run.

    Args:
        path: the file, for messages.

    Raises:
        SyntaxError: the source is no Python.
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
