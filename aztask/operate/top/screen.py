"""The terminal application of ``aztask top``.

Rules
1. Figures are read on a thread; a service that does not answer never blocks the keys.
2. Every text comes from messages and may be hostile: it is shown as plain text, control characters
   as escapes, never as markup.
3. A table keeps its cursor while its rows change.
4. The figures and the filter are those of the dashboard's overview: `aztask.operate.firstpage`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from aztask.errors import ConfigurationError
from aztask.operate.attention import Notice
from aztask.operate.cli.output import ago
from aztask.operate.cli.stats import COLUMNS as DONE
from aztask.operate.cli.stats import cells
from aztask.operate.firstpage import Done, Overview, OverviewFilter, OverviewReader
from aztask.operate.history import WINDOW_NAMES
from aztask.support.display import mask, plural, safe_str, visible
from aztask.support.durations import span

COLUMNS: Final = {
    "done": ("", *DONE),
    "queues": ("queue", "total", "active", "leased", "scheduled", "deferred", "dead"),
    "workers": ("worker", "state", "queues", "running", "leased", "finished", "tasks/s"),
    "running": ("task", "id", "queue", "retries", "for", "worker"),
    "failures": ("ended", "task", "id", "error"),
}
MOST_ROWS: Final = 200
MOST_NOTICES: Final = 5
TITLES: Final = {"done": "what workers did"}
LONGEST_CELL: Final = 80
INTERVALS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class TopApp(App[None]):
    """Shows what `reader` reads, until the user quits."""

    TITLE = "aztask top"
    AUTO_FOCUS = "#done"  # else the filter, which is hidden, would get the keys
    CSS = """
    Static { height: auto; padding: 0 1; }
    #notices { color: $warning; }
    #filter { display: none; }
    #wrong { color: $error; }
    DataTable { height: auto; max-height: 14; margin-bottom: 1; }
    .title { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("p", "pause", "Pause"),
        ("r", "refresh", "Refresh"),
        ("slash", "filter", "Filter"),
        ("escape", "leave_filter", "Leave the filter"),
        ("plus", "faster", "Faster"),
        ("minus", "slower", "Slower"),
    ]

    def __init__(
        self,
        reader: OverviewReader,
        *,
        address: str,
        interval: float = 2.0,
        chosen: OverviewFilter | None = None,
    ) -> None:
        """What to read, and how often.

        * `address`: of the broker, with its secrets masked. `interval`: seconds between readings.
        * `chosen`: the first filter; None for everything.
        """
        super().__init__()
        self.interval = interval
        self.paused = False
        self.overview = Overview()
        self.chosen = chosen or OverviewFilter()
        self._reader = reader
        self._address = address
        self._reading = False
        self._next_at = 0.0

    def compose(self) -> ComposeResult:
        """A line with sums, what needs attention, then a table for each kind of figure."""
        yield Static(id="summary")
        yield Static(id="notices")
        yield Static(id="wrong")
        yield Input(id="filter", placeholder="queue=mail task=NAME worker=NAME window=day by=queue")
        with VerticalScroll():
            for name in COLUMNS:
                yield Static(TITLES.get(name, name), id=f"title-{name}", classes="title")
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
            found = self._reader.read(self.chosen)
        finally:
            self._reading = False
            self._next_at = time.monotonic() + self.interval
        self.call_from_thread(self.show, found)

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

    # -- the filter --------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Ask for a filter, beginning with the present one."""
        field = self.query_one("#filter", Input)
        field.value = str(self.chosen).replace("&", " ")
        field.display = True
        field.focus()

    def action_leave_filter(self) -> None:
        """Ask for no other filter: the present one stays."""
        field = self.query_one("#filter", Input)
        if field.display:
            field.display = False
            self.query_one("#wrong", Static).update("")
            self.query_one("#done", DataTable).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the filter that was typed, or say what is wrong with it and ask again."""
        try:
            self.chosen = OverviewFilter.parse(event.value)
        except ConfigurationError as error:
            self.query_one("#wrong", Static).update(Text(visible(safe_str(error))))
            return
        self.action_leave_filter()
        self._next_at = 0.0  # the next tick reads, also while a reading is under way

    # -- showing -----------------------------------------------------------------------------

    def show(self, found: Overview) -> None:
        """Replace what all tables and lines show."""
        self.overview = found
        figures = found.figures
        self._summarize()
        self.query_one("#notices", Static).update(Text(_notices(found.notices)))
        self._show_done(found)
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

    def _show_done(self, found: Overview) -> None:
        """The figures of `aztask stats`: of all, then of each queue, task or worker."""
        chosen, did = found.chosen, found.done
        window = WINDOW_NAMES.get(chosen.window, chosen.window)
        title = f"what workers did in the last {window}, by {chosen.by}"
        if chosen.conditions:
            only = ", ".join(f"{name} {value}" for name, value in chosen.conditions.items())
            title += f"; only {only}"
        if did.why:
            title += f": {did.why}"
        self.query_one("#title-done", Static).update(Text(visible(mask(title))))
        self._fill("done", _done_rows(did))

    def _summarize(self) -> None:
        found = self.overview
        state = "paused" if self.paused else f"every {self.interval:g} s"
        silent = f" + {found.silent} silent" if found.silent else ""
        line = (
            f"{self._address}   {found.backlog} waiting   {found.dead} dead   "
            f"{found.alive} workers{silent}   {found.running} running   "
            f"{_rate(found.figures.rate)} tasks/s   {state}"
        )
        self.query_one("#summary", Static).update(Text(visible(line)))

    def _fill(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Replace a table's rows; the cursor stays on its line, the scroll position too."""
        table = self.query_one(f"#{name}", DataTable)
        row, offset = table.cursor_row, table.scroll_offset
        table.clear()
        for row_cells in rows[:MOST_ROWS]:
            table.add_row(*map(_cell, row_cells))
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1), animate=False, scroll=False)
        table.scroll_to(offset.x, offset.y, animate=False)


def _notices(notices: Sequence[Notice]) -> str:
    """What needs attention, a line each, the most urgent first."""
    lines = [f"{each.level.value}: {each.text}" for each in notices[:MOST_NOTICES]]
    if len(notices) > MOST_NOTICES:
        lines.append(f"and {plural(len(notices) - MOST_NOTICES, 'more notice')}")
    return "\n".join(visible(mask(each)) for each in lines)


def _done_rows(did: Done) -> list[list[Any]]:
    if did.view is None:
        return []
    rows = [("(all)", did.view.figure), *did.view.figures()]
    return [[name, *cells(figure)] for name, figure in rows]


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
