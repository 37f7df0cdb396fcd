"""The live view in a terminal: a line for each worker, and one for each of the oldest requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.live import Live
from rich.text import Text

from .columns import COLUMNS, LEGEND, ordered, summary
from .reading import Look, Reader
from .texts import printable

REQUESTS = ("request", "worker", "state", "seconds", "prompt", "held", "out")


def watch(reader: Reader, interval: float, sort: str) -> None:
    """Show the workers every ``interval`` seconds, sorted by a column, until an exception ends it."""
    with Live(Text("looking ..."), screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(reader.look(), sort), refresh=True)
            time.sleep(interval)


def view(look: Look, sort: str) -> Text:
    """The screen. What does not fit is cut off."""
    ranks = ordered(look.ranks, sort)
    heading = [column.title + "▼" * (name == sort) for name, column in COLUMNS.items()]
    workers = _lines(heading, [[column.shown(rank) for column in COLUMNS.values()] for rank in ranks])
    shown = Text(no_wrap=True, overflow="crop").append(summary(look) + "\n\n", "bold")
    for line, rank in zip(workers, [None, *ranks], strict=True):
        shown.append(line + "\n", "bold red" if rank and (rank.error or rank.audit) else "")
    return shown.append("\n".join(["", *_lines(REQUESTS, map(_request, look.oldest)), "", LEGEND]))


def _request(each: dict[str, Any]) -> list[Any]:
    """The cells of a request; an older worker tells less of it."""
    names = ("rid", "worker", "state", "seconds", "prompt_tokens", "decode_prefix", "output_tokens")
    return [f"{each[name]:.1f}" if name == "seconds" else each.get(name, "–") for name in names]


def _lines(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    cells = [[*heading], *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
