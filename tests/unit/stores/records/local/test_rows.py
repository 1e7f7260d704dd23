"""Rows of the local result store: each is checked on its own."""

import sqlite3

import pytest

from aztask.stores.local.rows import rows_of
from aztask.stores.records.base import RunKey, State, WorkerRecord
from aztask.stores.records.local.rows import _NAMES, has_key, run_of, worker_of, worker_row
from aztask.stores.records.rowsigning import NO_SIGNER


def test_text_that_is_not_utf8_is_bytes_and_harms_no_other_row():
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (x TEXT)")
    connection.execute("INSERT INTO t VALUES ('good'), (CAST(x'ff' AS TEXT))")
    assert rows_of(connection, "SELECT x FROM t", ()) == [("good",), (b"\xff",)]
    assert connection.text_factory is str
    with pytest.raises(sqlite3.OperationalError):
        rows_of(connection, "SELECT x FROM missing", ())
    connection.close()


def test_a_workers_row_is_read_back_with_additions_of_newer_releases():
    worker = WorkerRecord("w", 1.0, 2.0, ("a",), 3, 4)
    name, seen_at, packed = worker_row(worker)
    assert worker_of(name, seen_at, packed) == worker
    damaged = worker_of("w", 2.0, b"\xc1")
    assert (damaged.name, bool(damaged.damage)) == ("w", True)


def test_a_row_without_a_readable_key_is_no_ones():
    names = len(_NAMES)
    row = (1, "a", -1, 0, *(None,) * (names - 4), "null", "its state is unknown")
    assert not has_key(row)
    run = run_of(row, NO_SIGNER)
    assert (run.record.state, run.record.key) == (State.UNREADABLE, RunKey("a"))
    assert run.ended is None
