"""Progress of a command on stderr: live rows on a terminal, otherwise one line per step.

Stdout is for results. Errors of writing (a closed pipe, a lost terminal, a full disk) are ignored: the command may have
run for hours.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Rows
    from rich.progress import TaskID

    from .cluster import Progress


class Display:
    """Shows current steps; finished ones stay as lines.

    parts: number of `begin`/`end` pairs; they get a bar, and their lines are indented. stamped: prefix lines with the
    seconds since the start.
    """

    def __init__(self, parts: int = 0, stamped: bool = False) -> None:
        self._console = _stderr()
        self._began, self._stamped = time.monotonic(), stamped
        self._parts, self._ended = parts, 0
        self._rows = _rows(self._console) if self._console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        if parts:
            self._row("all", "workloads", bar=True, total=parts, state=f"0/{parts}")

    def __enter__(self) -> Display:
        if self._rows:
            with contextlib.suppress(OSError):
                self._rows.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            with contextlib.suppress(OSError):
                self._rows.stop()

    def now(self, text: str) -> None:
        """Show the current step."""
        if self._rows:
            self._row("now", text, bar=bool(self._parts), total=None, state="")
        else:
            self._line(f"  {text}")

    def done(self, text: str) -> None:
        """Print a finished step."""
        self._line(f"  {text}" if self._parts else text)

    def begin(self, title: str, total: int) -> None:
        """Begin a part of ``total`` requests over all its runs."""
        self._line(title)
        self._row("now", title, bar=True, total=total, completed=0, state="")

    def step(self, label: str, completed: int, state: str) -> None:
        """Show the completed requests of the part."""
        self._row("now", label, completed=completed, state=state)

    def end(self) -> None:
        """End a part."""
        self._ended += 1
        self._row("all", "workloads", completed=self._ended, state=f"{self._ended}/{self._parts}")

    def startup(self, progress: Progress) -> None:
        """Print a step of a cluster's start; on a terminal each process also has a row until the end."""
        self._line(str(progress))
        name = progress.process.name if progress.process else "cluster"
        self._row(name, name, total=1, completed=int(progress.is_ready), state=progress.phase)

    def _row(self, key: str, text: str, **fields: object) -> None:
        if self._rows is None:
            return
        with contextlib.suppress(OSError):
            if key not in self._tasks:
                # A row that is complete when added would not count as finished.
                with contextlib.suppress(OSError):
                    self._rows.add_task("", total=None, bar=False, state="")
                # The row exists although it could not be drawn.
                self._tasks[key] = self._rows.task_ids[-1]
            text = text[: max(20, self._console.width - 40)]
            self._rows.update(self._tasks[key], description=text, **fields)  # type: ignore[arg-type]

    def _line(self, text: str) -> None:
        from rich.text import Text

        stamp = f"[{time.monotonic() - self._began:5.0f} s] " if self._stamped else ""
        with contextlib.suppress(OSError):
            self._console.print(Text(stamp + text), soft_wrap=True)


def _stderr() -> Console:
    from rich.console import Console

    class Stderr(Console):
        """Survives a closed pipe; rich would redirect stdout and exit."""

        def on_broken_pipe(self) -> None:
            """Print no more, and keep Python's exit from failing."""
            self.quiet = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)

    return Stderr(stderr=True, highlight=False)


def _rows(console: Console) -> Rows:
    from rich.progress import BarColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Rows
    from rich.progress_bar import ProgressBar

    class Bar(BarColumn):
        """A bar for rows with a count."""

        def render(self, task: Task) -> ProgressBar:
            """Its bar, or one without width."""
            if task.fields["bar"]:
                return super().render(task)
            return ProgressBar(total=1, width=0)

    return Rows(
        SpinnerColumn(finished_text="[green]ok[/]"),
        TextColumn("{task.description}", markup=False),
        Bar(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def print_ready(progress: Progress, file: TextIO | None = None) -> None:
    """Print the steps of a start at which a process is ready, to stdout or ``file``."""
    if progress.is_ready:
        print(progress, file=file or sys.stdout, flush=True)
