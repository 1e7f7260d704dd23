"""A list of runs for a search, from the result file: window after window of rows.

A window is a stretch of rows in the order of their first starts, so no index is needed; within it,
the run that ended last comes first. A place names the window and a run in it: rows that come, or
that end, in the meantime are in the same window as before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from aztask.errors import ConfigurationError
from aztask.queues.engine import Database
from aztask.stores.local.rows import rows_of
from aztask.stores.records.base import NO_SUCH_PLACE, RunLine, RunRecord, State
from aztask.stores.records.local.rows import COLUMNS, run_of
from aztask.stores.records.rowsigning import RowSigner

WINDOW: Final = 2_000
"""Rows of a window."""
STRETCH: Final = 50_000
"""Rows among which those of one state are looked for: a rare one does not make a window long."""
_PLACE: Final = re.compile(
    r"(\d{1,18})~(inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)~(\d{1,10})~(\d{1,10})~(.*)",
    re.ASCII | re.DOTALL,
)
_ENDS: Final = "SELECT coalesce(min(id), 0), coalesce(max(id), 0) + 1 FROM runs"
_WINDOW: Final = f"""
    SELECT {COLUMNS} FROM runs
    WHERE id < :below AND id >= :least AND (:state = '' OR state = :state)
    AND (:mine = '' OR broker IS NULL OR broker = :mine)
    ORDER BY id DESC LIMIT {WINDOW}
"""

_Order = tuple[float, str, int, int]
_FIRST: Final = (float("-inf"), "", 0, 0)
"""Before all runs of a window."""


class LocalLines:
    """Implements `aztask.stores.records.base.RunLines`: all that a row says is known at once."""

    requests = 0

    def __init__(
        self, database: Database, signer: RowSigner, state: State | None, after: str, mine: str
    ) -> None:
        """mine: whose runs, "" for everyone's. Raises ConfigurationError for a place that is none.

        after: behind which line the list begins.
        """
        self._database = database
        self._signer = signer
        self._state = "" if state is None else state.value
        self._mine = mine
        self._below: int | None = None
        self._behind: _Order | None = None
        self._records: dict[str, RunRecord] = {}
        self.place = after
        self.ended = False
        if after:
            self._below, self._behind = _read(after)

    def more(self, seconds: float) -> Sequence[RunLine]:
        """The lines of the next window; none of a stretch without rows of the state."""
        with self._database.read() as connection:
            first, end = connection.execute(_ENDS).fetchone()
            below = end if self._below is None else min(self._below, end)
            least = below - STRETCH if self._state else 0
            values = {"below": below, "least": least, "state": self._state, "mine": self._mine}
            rows = rows_of(connection, _WINDOW, values)
        found = sorted(
            (
                (_order(record), record)
                for record in (run_of(row, self._signer).record for row in rows)
            ),
            key=lambda pair: pair[0],
        )
        if self._behind is not None:
            found = [pair for pair in found if pair[0] > self._behind]
        self._records = {_place(below, order): record for order, record in found}
        full = len(rows) == WINDOW
        self._below, self._behind = (rows[-1][0] if full else least), None
        self.place = _place(max(0, self._below), _FIRST)
        self.ended = not full and least <= first
        return [_line(place, record) for place, record in self._records.items()]

    def read(self, lines: Sequence[RunLine], seconds: float) -> list[RunRecord | None]:
        """The runs as they were read for the lines."""
        return [self._records[each.place] for each in lines]


def _line(place: str, run: RunRecord) -> RunLine:
    at = _order(run)[0]
    if run.state is State.UNREADABLE:
        return RunLine(place, run.state, None, run.key.task_id)
    outcome = run.outcome
    return RunLine(
        place,
        run.state,
        None if at == float("-inf") else -at,
        run.key.task_id,
        run.task,
        run.queue,
        run.worker,
        "" if outcome is None else outcome.error_text,
        None if outcome is None else outcome.duration,
    )


def _order(run: RunRecord) -> _Order:
    """The newest first; a run that was only sent comes before all that started."""
    at = run.started_at if run.outcome is None else run.outcome.at
    key = run.key
    return (-at if at is not None else float("-inf"), key.task_id, key.generation, key.hop)


def _place(below: int, order: _Order) -> str:
    at, task_id, generation, hop = order
    return f"{below}~{-at!r}~{generation}~{hop}~{task_id}"


def _read(place: str) -> tuple[int, _Order]:
    parts = _PLACE.fullmatch(place)
    if parts is None:
        raise ConfigurationError(NO_SUCH_PLACE)
    below, at, generation, hop, task_id = parts.groups()
    return int(below), (-float(at), task_id, int(generation), int(hop))
