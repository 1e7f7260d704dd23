"""Every place in which a store keeps something, as the code has it, and how it is encrypted there.

A new kind of row, a new table or a new column belongs into these lists, so that none is forgotten.
`tests/integration/test_nothing_in_clear.py` looks for a secret in what they keep.
"""

from __future__ import annotations

import importlib
import pkgutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from aztask import App
from aztask.stores.rows import Kind

SIGNED_ROW: Final = "encrypted by aztask.steps.records"
MESSAGE: Final = "a message, encrypted by Codec.to_envelope"
ROW: Final = "encrypted by aztask.stores.records.rowsigning"
DOCUMENT: Final = "encrypted by aztask.stores.records.documentsigning"
OPERATORS: Final = "what operators set and did, and counters: no values of tasks"
CLEAR: Final = "names, ids, states, times, digests"
COUNTS: Final = "names of queues, tasks and workers, times and counts"
PROGRESS: Final = "checkpoints in it are encrypted by aztask.worker.upkeep.heartbeat"
DESCRIPTION: Final = "with encryption an error's type and line: aztask.worker.pool.attempt"

KINDS: Final = {
    "PARTS": {"data": SIGNED_ROW},
    "STEPS": {"data": SIGNED_ROW},
    "WAITS": {"data": f"signals: {SIGNED_ROW}; parked runs: {MESSAGE}"},
    "HOLDERS": {"data": MESSAGE},
    "NOTES": {"envelope": MESSAGE, "reason": CLEAR, "description": DESCRIPTION},
    "READ": {},
    "NUMBERS": {},
    "ENTRIES": {"data": OPERATORS, "signature": CLEAR},
    "OPERATIONS": {"data": OPERATORS},
    "ONCE_RUNS": {"data": CLEAR},
    "ADOPTIONS": {"signature": CLEAR},
    "HISTORY": {"brief": COUNTS, "data": COUNTS},
}
"""The columns of bytes and text, by the name of the kind."""

TABLES: Final = {
    "runs": {
        "value": ROW,
        "saved": ROW,
        "error": "empty: it is in value",
        "traceback": "empty: it is in value",
        "earlier": "with encryption without texts of errors",
        "settlement": DESCRIPTION,
        "note": "what a frontend notes at the send: names and ids",
        "position": CLEAR,
        "signature": CLEAR,
        "saved_signature": CLEAR,
    },
    "sqlite_sequence": {"name": CLEAR, "seq": CLEAR},
    "workflow_documents": {"data": DOCUMENT, "signature": CLEAR},
    "workers": {"record": PROGRESS},
    "schedules": {"data": f"its template: {MESSAGE}; rules and times: {CLEAR}"},
    "apart_schedules": {"data": "as that of schedules"},
    "occurrences": {"data": CLEAR},
    "apart_occurrences": {"data": CLEAR},
    "schedule_claims": {"data": "a keyed digest of the definition, releases and times"},
}
"""The columns that may hold anything, of the tables that are no kinds."""


def kinds() -> dict[str, Kind]:
    found = {}
    for package in ("stores", "steps", "operate", "uniqueness", "limits", "schedules", "workflows"):
        root = importlib.import_module(f"aztask.{package}")
        for module in pkgutil.walk_packages(root.__path__, f"aztask.{package}."):
            if ".cli" in module.name or ".top" in module.name:
                continue
            values = vars(importlib.import_module(module.name))
            found |= {name: each for name, each in values.items() if isinstance(each, Kind)}
    return found


def test_each_kind_of_row_says_how_its_columns_are_encrypted() -> None:
    found = {
        name: {column for column, kind in each.columns.items() if kind in (bytes, str)}
        for name, each in kinds().items()
    }
    assert found == {name: set(columns) for name, columns in KINDS.items()}


def test_each_column_of_the_other_tables_is_known(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    app = App("shop", broker="local://:memory:", results=f"local://{path}")
    assert app.results is not None
    app.results.get("x")
    app.schedules.create("s", app.task(name="shop.t")(lambda: None).s(), every=60.0)
    app.close()
    of_kinds = {name for each in kinds().values() for name in (each.sql.owned, each.sql.unowned)}
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        columns = {name: _open_columns(connection, name) for (name,) in found.fetchall()}
    assert {name: each for name, each in columns.items() if each and name not in of_kinds} == {
        name: set(each) for name, each in TABLES.items()
    }


def _open_columns(connection: sqlite3.Connection, table: str) -> set[str]:
    """Those of bytes or of any type, and the texts of errors."""
    rows = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return {
        name for _, name, kind, *_ in rows if kind in ("", "BLOB") or name in ("error", "traceback")
    }
