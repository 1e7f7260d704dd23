"""The terminal application of ``aztask top``.

Rules
1. Figures are read on a thread; a service that does not answer never blocks the keys.
2. Every text comes from messages and may be hostile: it is shown as plain text, control characters
   as escapes, never as markup.
3. A table keeps its cursor while its rows change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from aztask.operate.cli.output import ago
from aztask.operate.overview import Figures, Reader
from aztask.support.display import visible
from aztask.support.durations import span

COLUMNS: Final = {
    "queues": ("queue", "total", "active", "leased", "scheduled", "deferred", "dead"),
    "workers": ("worker", "state", "queues", "running", "leased", "finished", "tasks/s"),
    "running": ("task", "id", "queue", "retries", "for", "worker"),
    "failures": ("ended", "task", "id", "error"),
}
MOST_ROWS: Final = 200
LONGEST_CELL: Final = 80
INTERVALS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class TopApp(App[None]):
    """Shows the figures of `reader` until the user quits."""

    TITLE = "aztask top"
    CSS = """
    Static { height: auto; padding: 0 1; }
    #problems { color: $warning; }
    DataTable { height: auto; max-height: 14; margin-bottom: 1; }
    .title { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("p", "pause", "Pause"),
        ("r", "refresh", "Refresh"),
        ("plus", "faster", "Faster"),
        ("minus", "slower", "Slower"),
    ]

    def __init__(self, reader: Reader, *, address: str, interval: float = 2.0) -> None:
        """address: of the broker, with its secrets masked. interval: seconds between readings."""
        super().__init__()
        self.interval = interval
        self.paused = False
        self.figures = Figures()
        self._reader = reader
        self._address = address
        self._reading = False
        self._next_at = 0.0

    def compose(self) -> ComposeResult:
        """A line with sums, then a table for each kind of figure."""
        yield Static(id="summary")
        yield Static(id="problems")
        with VerticalScroll():
            for name in COLUMNS:
                yield Static(name, classes="title")
                yield DataTable(id=name, cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Make the columns, and read for the first time."""
        for name, columns in COLUMNS.items():
            self.query_one(f"#{name}", DataTable).add_columns(*columns)
        self.set_interval(0.2, self._tick)
        self._tick()

    # -- reading -----------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self.paused and time.monotonic() >= self._next_at:
            self.action_refresh()

    def action_refresh(self) -> None:
        """Read now, unless a reading is under way."""
        if not self._reading:
            self._reading = True
            self.run_worker(self._read, thread=True, exit_on_error=False)

    def _read(self) -> None:
        try:
            figures = self._reader.read()
        finally:
            self._reading = False
            self._next_at = time.monotonic() + self.interval
        self.call_from_thread(self.show, figures)

    def action_pause(self) -> None:
        """Stop and go on with the readings."""
        self.paused = not self.paused
        self._summarize()

    def action_faster(self) -> None:
        """Take the next shorter of `INTERVALS`."""
        self._change_interval(-1)

    def action_slower(self) -> None:
        """Take the next longer of `INTERVALS`."""
        self._change_interval(1)

    def _change_interval(self, step: int) -> None:
        nearest = min(INTERVALS, key=lambda each: abs(each - self.interval))
        place = INTERVALS.index(nearest) + step
        self.interval = INTERVALS[max(0, min(len(INTERVALS) - 1, place))]
        self._next_at = time.monotonic() + self.interval
        self._summarize()

    # -- showing -----------------------------------------------------------------------------

    def show(self, figures: Figures) -> None:
        """Replace what all tables and lines show."""
        self.figures = figures
        self._summarize()
        problems = "\n".join(visible(each) for each in figures.problems)
        self.query_one("#problems", Static).update(Text(problems))
        self._fill(
            "queues",
            [
                (each.queue, each.living, each.active, each.leased, each.scheduled,
                 each.deferred, each.dead)
                for each in figures.queues
            ],
        )  # fmt: skip
        self._fill(
            "workers",
            [
                (each.record.name, each.state, ",".join(each.record.queues), each.record.running,
                 each.record.leased, each.record.finished, _rate(each.rate))
                for each in figures.workers
            ],
        )  # fmt: skip
        self._fill(
            "running",
            [
                (each.task.task, each.task.task_id, each.task.queue, each.task.retries,
                 span(each.seconds), each.worker.name)
                for each in figures.running
            ],
        )  # fmt: skip
        self._fill(
            "failures",
            [
                (ago(each.outcome.at, figures.at), each.task, each.key.task_id,
                 f"{each.outcome.error_type}: {each.outcome.error}")
                for each in figures.failures
                if each.outcome is not None
            ],
        )  # fmt: skip

    def _summarize(self) -> None:
        figures = self.figures
        alive = sum(each.state == "alive" for each in figures.workers)
        messages = sum(each.living for each in figures.queues)
        dead = sum(each.dead or 0 for each in figures.queues)
        state = "paused" if self.paused else f"every {self.interval:g} s"
        line = (
            f"{self._address}   {messages} messages   {dead} dead   {alive} workers   "
            f"{len(figures.running)} running   {_rate(figures.rate)} tasks/s   {state}"
        )
        self.query_one("#summary", Static).update(Text(visible(line)))

    def _fill(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Replace a table's rows; the cursor stays on its line, the scroll position too."""
        table = self.query_one(f"#{name}", DataTable)
        row, offset = table.cursor_row, table.scroll_offset
        table.clear()
        for cells in rows[:MOST_ROWS]:
            table.add_row(*(_cell(each) for each in cells))
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1), animate=False, scroll=False)
        table.scroll_to(offset.x, offset.y, animate=False)


def _cell(value: object) -> Text:
    """A value as plain text (rule 2); numbers to the right."""
    if value is None:
        return Text("-", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    text = visible(str(value).replace("\n", " "))
    return Text(text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
