"""SQLite's errors, as those of aztask."""

import sqlite3

import pytest

from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    EncodeError,
    MessageTooLarge,
    QueueFull,
)
from aztask.queues.engine.filesystem import TRANSLATED, translate


def error_of(name):
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SQLITE_FULL", QueueFull),
        ("SQLITE_IOERR_WRITE", QueueFull),
        ("SQLITE_IOERR_READ", BrokerUnavailable),
        ("SQLITE_BUSY", BrokerUnavailable),
        ("SQLITE_BUSY_SNAPSHOT", BrokerUnavailable),
        ("SQLITE_NOTADB", ConfigurationError),
        ("SQLITE_CORRUPT_INDEX", ConfigurationError),
        ("SQLITE_READONLY_DBMOVED", ConfigurationError),
        ("SQLITE_MISMATCH", EncodeError),
        ("SQLITE_TOOBIG", MessageTooLarge),
        ("SQLITE_SOMETHING_NEW", BrokerError),
    ],
)
def test_the_code_decides(name, kind):
    error = translate(error_of(name), "/q.db")
    assert type(error) is kind
    assert "/q.db" in str(error) and "\n" not in str(error)


def test_an_error_without_a_code_goes_by_its_type():
    assert type(translate(sqlite3.InterfaceError("type"), "/q.db")) is EncodeError
    assert type(translate(sqlite3.ProgrammingError("closed"), "/q.db")) is BrokerError


@pytest.mark.parametrize("value", ["\ud800", 2**64])
def test_values_that_sqlite_cannot_hold(value):
    connection = sqlite3.connect(":memory:")
    with pytest.raises(TRANSLATED) as raised:
        connection.execute("SELECT ?", (value,))
    connection.close()
    assert isinstance(translate(raised.value, "/q.db"), EncodeError)
