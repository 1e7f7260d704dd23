"""Every place in which a store keeps something, as the code has it, and how it is encrypted there.

A new kind of row, a new table or a new column belongs into the lists of `storeplaces`, so that none
is forgotten. `tests/integration/test_nothing_in_clear.py` looks for a secret in what they keep.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from storeplaces import KINDS, TABLES, kinds

from aztask import App


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
