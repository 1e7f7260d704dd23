"""Waiting for another connection's write lock."""

import sqlite3
import threading
import time

import pytest

from aztask.queues.engine.database import PatientConnection


@pytest.fixture
def open_file(tmp_path):
    opened = []

    def connect(patience=0.0):
        connection = sqlite3.connect(
            tmp_path / "q.db",
            timeout=0.0,
            isolation_level=None,
            factory=PatientConnection,
            check_same_thread=False,
        )
        connection.patience = patience
        opened.append(connection)
        return connection

    first = connect()
    first.execute("PRAGMA journal_mode = WAL")  # as the engine; else a reader disturbs a COMMIT
    first.execute("CREATE TABLE t (i)")
    yield connect
    for connection in opened:
        connection.close()


def test_the_lock_is_waited_for(open_file):
    holder, waiter = open_file(), open_file(30.0)
    holder.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.1, holder.execute, ["COMMIT"])
    timer.start()
    assert waiter.execute("INSERT INTO t VALUES (1)").rowcount == 1
    timer.join()


def test_patience_ends(open_file):
    holder, waiter = open_file(), open_file(0.05)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        waiter.execute("INSERT INTO t VALUES (1)")
    holder.execute("ROLLBACK")


def test_other_errors_come_at_once(open_file):
    began = time.monotonic()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        open_file(30.0).execute("SELECT * FROM missing")
    assert time.monotonic() - began < 15.0


def test_inside_a_transaction_nothing_is_waited_for(open_file):
    """The snapshot is old: the lock cannot be had by waiting."""
    writer, reader = open_file(), open_file(30.0)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM t").fetchall()
    writer.execute("INSERT INTO t VALUES (1)")
    began = time.monotonic()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        reader.execute("INSERT INTO t VALUES (2)")
    assert time.monotonic() - began < 15.0
    reader.execute("ROLLBACK")
