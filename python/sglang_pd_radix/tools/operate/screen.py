"""The live view of a terminal: a table of workers and one of requests, looked at again and again."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import DataTable, Footer, Static

from .columns import COLUMNS, ordered, summary
from .reading import Look, Reader

REQUESTS = ("request", "worker", "state", "seconds", "prompt", "held", "out")
ORDER = tuple(COLUMNS)


class Top(App[None]):
    """Workers above, their oldest requests below."""

    CSS = "#summary { height: 1; text-style: bold; } #workers { height: 1fr; } #requests { height: 1fr; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "End"),
        ("less_than_sign", "column(-1)", "Left"),
        ("greater_than_sign", "column(1)", "Right"),
        ("r", "turn", "Turn"),
        ("h", "sort('held')", "Held"),
        ("w", "sort('waiting')", "Waiting"),
        ("b", "sort('sent')", "Bytes"),
        ("f", "sort('failures')", "Failures"),
    ]

    class Looked(Message):
        """All workers have been looked at."""

        def __init__(self, look: Look):
            super().__init__()
            self.look = look

    def __init__(self, reader: Reader, interval: float, sort: str):
        """interval: seconds between looks. sort: one of `COLUMNS`."""
        super().__init__()
        self._reader, self._interval, self.sorted_by, self.turned = reader, interval, sort, False
        self._look: Look | None = None

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static("looking ...", id="summary", markup=False)
        yield DataTable(id="workers", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#requests", DataTable).add_columns(*REQUESTS)
        self.set_interval(self._interval, self._begin_look)
        self._begin_look()

    def _begin_look(self) -> None:
        # One that takes longer than the interval is waited for.
        if not any(worker.is_running for worker in self.workers if worker.group == "look"):
            self.run_worker(self._take_look, thread=True, group="look", exit_on_error=False)

    def _take_look(self) -> None:
        # Without waiting for its being shown: who has asked for the end meanwhile would wait for that for ever.
        self.post_message(self.Looked(self._reader.look()))

    def on_top_looked(self, message: Looked) -> None:
        """Show what has been seen."""
        self._show(message.look)

    def action_column(self, step: int) -> None:
        """Sort by the next column to the right, or the left."""
        self.action_sort(ORDER[(ORDER.index(self.sorted_by) + step) % len(ORDER)])

    def action_sort(self, column: str) -> None:
        """Sort by a column."""
        self.sorted_by, self.turned = column, False
        self._show(self._look)

    def action_turn(self) -> None:
        """Turn the order."""
        self.turned = not self.turned
        self._show(self._look)

    def _show(self, look: Look | None) -> None:
        if look is None:
            return
        self._look = look
        self.query_one("#summary", Static).update(summary(look))
        workers = self.query_one("#workers", DataTable)
        row, (x, y) = workers.cursor_row, workers.scroll_offset
        workers.clear(columns=True)
        mark = "▲" if self.turned else "▼"
        for name, column in COLUMNS.items():
            workers.add_column(column.title + (mark if name == self.sorted_by else ""), key=name)
        for rank in ordered(look.ranks, self.sorted_by, self.turned):
            style = "bold red" if rank.error or rank.audit else ""
            workers.add_row(*(Text(column.shown(rank), style=style) for column in COLUMNS.values()))
        workers.move_cursor(row=min(row, max(len(look.ranks) - 1, 0)))
        workers.scroll_to(x, y, animate=False)
        requests = self.query_one("#requests", DataTable)
        requests.clear()
        for each in look.oldest:
            shown = (each["rid"], each["worker"], each["state"], f"{each['seconds']:.1f}")
            tokens = (each["prompt_tokens"], each["decode_prefix"], each["output_tokens"])
            requests.add_row(*(Text(str(cell)) for cell in (*shown, *tokens)))
