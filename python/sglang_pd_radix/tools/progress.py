"""Progress of a command, as lines on stderr. Stdout is for results.

Errors of writing (a closed pipe, a lost terminal, a full disk) are ignored: the command may have run for hours.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import Progress


class Display:
    """Prints the steps of a command. stamped: with the seconds since its start."""

    def __init__(self, stamped: bool = False) -> None:
        self._began = time.monotonic() if stamped else None

    def done(self, text: str) -> None:
        """Print a finished step, or the heading of several."""
        stamp = "" if self._began is None else f"[{time.monotonic() - self._began:5.0f} s] "
        try:
            print(stamp + text, file=sys.stderr, flush=True)
        except OSError:
            # Print no more, and keep Python's exit from failing.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)

    def now(self, text: str) -> None:
        """Print a step that begins, or one below a heading."""
        self.done(f"  {text}")

    def startup(self, progress: Progress) -> None:
        """Print a step of a cluster's start."""
        self.done(str(progress))


def print_ready(progress: Progress) -> None:
    """Print the steps of a start at which a process is ready, to stdout."""
    if progress.is_ready:
        print(progress, flush=True)
