"""One statement for many rows: every size does what single rows would."""

import sqlite3

import pytest

from aztask.queues.engine.queues import BatchStatement

INSERT = BatchStatement(
    "INSERT INTO t VALUES (?, ?, ?)",
    "INSERT INTO t SELECT ?, column1, column2 FROM (VALUES {rows})",
    "(?, ?)",
)
DELETE = BatchStatement(
    "DELETE FROM t WHERE a = ? AND b = ? AND head = ?",
    "DELETE FROM t WHERE (a, b) IN (VALUES {rows}) AND head = ?",
    "(?, ?)",
)


@pytest.fixture
def connection():
    made = sqlite3.connect(":memory:")
    made.execute("CREATE TABLE t (head, a, b)")
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 19, 20, 21, 99, 100, 101, 119, 120, 141, 320])
def test_every_row_is_done_once_and_in_order(connection, count):
    rows = [(n, str(n)) for n in range(count)]
    assert INSERT.run(connection, rows, ("h",)) == count
    stored = connection.execute("SELECT a, b FROM t ORDER BY rowid").fetchall()
    assert stored == rows
    assert DELETE.run(connection, rows, (), ("other",)) == 0
    assert DELETE.run(connection, rows, (), ("h",)) == count


def test_rows_that_change_nothing_are_not_counted(connection):
    INSERT.run(connection, [(n, "x") for n in range(30)], ("h",))
    assert DELETE.run(connection, [(n, "x") for n in range(20, 60)], (), ("h",)) == 10
