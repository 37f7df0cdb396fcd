"""The live view in a terminal: a table of workers and one of requests."""

from __future__ import annotations

import asyncio
import signal
import time
from types import FrameType
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable, Footer, Static

from ..process_group import ends, handled
from .columns import COLUMNS, LEGEND, ordered, summary
from .reading import Look, Reader
from .texts import printable

REQUESTS = ("request", "worker", "state", "seconds", "prompt", "held", "out")
LOOKING = "looking ..."
ORDER = tuple(COLUMNS)


class Top(App[None]):
    """Workers above, their oldest requests below."""

    CSS = (
        "#summary { height: 1; text-style: bold; } #workers { height: 1fr; } #requests { height: 1fr; } "
        "#legend { height: auto; color: $text-muted; }"
    )
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "End"),
        # Overrides the screen's own binding, which copies a selection.
        Binding("ctrl+c", "quit", show=False, priority=True),
        ("less_than_sign", "column(-1)", "Left"),
        ("greater_than_sign", "column(1)", "Right"),
        ("r", "turn", "Turn"),
        ("h", "sort('held')", "Held"),
        ("w", "sort('waiting')", "Waiting"),
        ("b", "sort('sent')", "Bytes"),
        ("f", "sort('failures')", "Failures"),
    ]

    class Looked(Message):
        """All workers have been read; ``trouble``: why not."""

        def __init__(self, look: Look | None, trouble: str = ""):
            super().__init__()
            self.look, self.trouble = look, trouble

    def __init__(self, reader: Reader, interval: float, sort: str):
        """interval: seconds between looks. sort: one of `COLUMNS`."""
        super().__init__()
        self._reader, self._interval, self.sorted_by, self.turned = reader, interval, sort, False
        self._look: Look | None = None
        self._trouble = ""

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(LOOKING, id="summary", markup=False)
        yield DataTable(id="workers", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield Static(LEGEND, id="legend", markup=False)
        yield Footer()

    async def run_async(self, **options: Any) -> None:
        """Run it; signals end it like a key, so that the terminal is restored."""
        loop = asyncio.get_running_loop()

        def end(signum: int, frame: FrameType | None) -> None:
            # A second signal ends it at once.
            signal.signal(signum, signal.SIG_DFL)
            loop.call_soon_threadsafe(self.exit, None, 128 + signum)

        with handled(ends(), end):
            await super().run_async(**options)

    def on_mount(self) -> None:
        """Start reading."""
        self.query_one("#requests", DataTable).add_columns(*REQUESTS)
        self.set_interval(self._interval, self._begin_look)
        self._begin_look()

    def _begin_look(self) -> None:
        # A look that takes longer than the interval delays the next one.
        if not any(worker.is_running for worker in self.workers if worker.group == "look"):
            self.run_worker(self._take_look, thread=True, group="look", exit_on_error=False)

    def _take_look(self) -> None:
        try:
            looked = self.Looked(self._reader.look())
        except Exception as error:
            # Report it: otherwise old figures would seem current.
            looked = self.Looked(None, f"cannot look: {type(error).__name__}: {error}")
        # Not awaited: after a request to end, that would block for ever.
        self.post_message(looked)

    def on_top_looked(self, message: Looked) -> None:
        """Show the figures, or the trouble."""
        self._look, self._trouble = message.look or self._look, message.trouble
        self._show()

    def action_column(self, step: int) -> None:
        """Sort by the next column to the right or left."""
        self.action_sort(ORDER[(ORDER.index(self.sorted_by) + step) % len(ORDER)])

    def action_sort(self, column: str) -> None:
        """Sort by a column."""
        self.sorted_by, self.turned = column, False
        self._show()

    def action_turn(self) -> None:
        """Reverse the order."""
        self.turned = not self.turned
        self._show()

    def _show(self) -> None:
        look = self._look
        if not self.query("#summary"):
            # The screen has been taken down meanwhile.
            return
        self.query_one("#summary", Static).update(self._summary(look))
        if look is None:
            return
        workers = self.query_one("#workers", DataTable)
        row, (x, y) = workers.cursor_row, workers.scroll_offset
        workers.clear(columns=True)
        mark = "▲" if self.turned else "▼"
        for name, column in COLUMNS.items():
            workers.add_column(column.title + (mark if name == self.sorted_by else ""), key=name)
        for rank in ordered(look.ranks, self.sorted_by, self.turned):
            style = "bold red" if rank.error or rank.audit else ""
            workers.add_row(*(self._cell(column.shown(rank), style) for column in COLUMNS.values()))
        workers.move_cursor(row=min(row, max(len(look.ranks) - 1, 0)))
        workers.scroll_to(x, y, animate=False)
        requests = self.query_one("#requests", DataTable)
        requests.clear()
        for each in look.oldest:
            told = [each.get(name, "–") for name in ("rid", "worker", "state")]
            tokens = [each.get(name, "–") for name in ("prompt_tokens", "decode_prefix", "output_tokens")]
            requests.add_row(*map(self._cell, (*told, f"{each['seconds']:.1f}", *tokens)))

    def _summary(self, look: Look | None) -> str:
        if not self._trouble:
            return summary(look) if look else LOOKING
        old = f"as of {time.strftime('%H:%M:%S', time.localtime(look.at))}, " if look else ""
        return printable(old + self._trouble)

    def _cell(self, told: Any, style: str = "") -> Text:
        # Dim: not current.
        return Text(printable(str(told)), style="dim" if self._trouble else style)
