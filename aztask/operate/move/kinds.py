"""Everything at an address that makes a worker act, and how ``aztask move`` treats it.

Rules
1. Every kind of row of a result store is named here, and every table of a local one:
   `tests/unit/operate/test_move_kinds.py` finds them by code, so that a new one without a way to
   move fails there.
2. What cannot be moved is found before anything is changed, and the move does not start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from aztask.app import App
from aztask.operate.action import results_of
from aztask.operate.ledger import OPERATIONS
from aztask.steps.parts import PARTS
from aztask.steps.records import STEPS
from aztask.steps.waits import WAITS
from aztask.stores.records.base import Measurable, ResultStore
from aztask.stores.records.controls import ENTRIES
from aztask.stores.records.deadindex import NOTES
from aztask.stores.records.history import HISTORY
from aztask.stores.records.onceruns import ONCE_RUNS
from aztask.stores.records.schedules import schedules_of
from aztask.stores.records.uniques import HOLDERS
from aztask.stores.records.workflows import workflows_of
from aztask.stores.rows import KeepsRows, Kind

OWNER: Final = "gets the new owner where it is"

ROWS: Final[Mapping[str, tuple[str, str]]] = {
    "runs": ("runs and results", OWNER),
    "workflow_documents": ("open workflows", OWNER),
    "schedules": ("schedules", OWNER),
    "WAITS": (
        "parked runs and signals",
        f"{OWNER}; timers move as messages, and are no longer cancelled by a signal",
    ),
    "STEPS": ("recorded steps", OWNER),
    "PARTS": ("streams", OWNER),
    "HOLDERS": ("unique keys and debounced calls", OWNER),
    "ENTRIES": ("pauses, limits, breakers and scales", OWNER),
    "ONCE_RUNS": ("at-most-once runs under way", OWNER),
    "NOTES": ("notes of dead letters", OWNER),
    "OPERATIONS": ("audit, jobs, mutes and notices", OWNER),
    "HISTORY": ("history of what workers did", OWNER),
}
"""By the name of the kind, or of the table: what it is for people, and how it moves."""

WITH: Final[Mapping[str, str]] = {
    "occurrences": "schedules",
    "apart_schedules": "schedules",
    "apart_occurrences": "schedules",
    "schedule_claims": "schedules",
    "READ": "NOTES",
    "ADOPTIONS": "runs",
}
"""Parts of a kind that move with it."""

STAY: Final[Mapping[str, str]] = {
    "workers": "heartbeats: each worker writes its own",
    "sqlite_sequence": "a counter of SQLite",
    "NUMBERS": "of aztask azure verify alone",
}
"""What no one acts on, and why it stays."""

COUNTED: Final[Mapping[str, Kind]] = {
    "WAITS": WAITS,
    "STEPS": STEPS,
    "PARTS": PARTS,
    "HOLDERS": HOLDERS,
    "ENTRIES": ENTRIES,
    "ONCE_RUNS": ONCE_RUNS,
    "NOTES": NOTES,
    "OPERATIONS": OPERATIONS,
    "HISTORY": HISTORY,
}
MOST_COUNTED: Final = 10_000


@dataclass(frozen=True, slots=True)
class Counted:
    """One kind of what is moved.

    * `what`, `how`: for people. `count`: None if it is not known before. `more`: there are more.
    """

    what: str
    how: str
    count: int | None
    more: bool = False


def rows(app: App) -> Iterator[Counted]:
    """The rows of the app's broker, by kind; at most `MOST_COUNTED` of each are counted."""
    store = results_of(app)
    for name, (what, how) in ROWS.items():
        number, more = _number(app, store, name)
        yield Counted(what, how, number, more)


def _number(app: App, store: ResultStore, name: str) -> tuple[int | None, bool]:
    """How many there are, and whether there are more; None if that is not known."""
    if name == "runs":
        size = store.size() if isinstance(store, Measurable) else None
        return (None, False) if size is None else (size.rows, not size.complete)
    if name == "schedules":
        schedules = schedules_of(store)
        return (0 if schedules is None else len(schedules.overview())), False
    if name == "workflow_documents":
        workflows = workflows_of(store)
        found = [] if workflows is None else workflows.open_workflows(MOST_COUNTED)
        return len(found), len(found) == MOST_COUNTED
    if not isinstance(store, KeepsRows):
        return None, False
    places = store.rows.of(COUNTED[name])
    mine = [each for each in places.owners() if each.broker == app.owner.broker]
    number = sum(sum(1 for _ in islice(places.of_owner(each), MOST_COUNTED)) for each in mine)
    return number, number >= MOST_COUNTED
