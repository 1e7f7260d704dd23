"""Marks of cancelled tasks in a file."""

import pytest

from aztask.queues.engine import Database
from aztask.stores.records.local.cancellations import LocalCancellations


@pytest.fixture
def database():
    database = Database(":memory:")
    yield database
    database.close()


def test_marks_are_set_found_and_deleted(database):
    marks = LocalCancellations(database)
    with database.transaction() as connection:
        assert not marks.any(connection)
        assert marks.to_stop(connection, ["a", "b"]) == []
        marks.mark(connection, "a", 1.0, running=False)
        marks.mark(connection, "b", 2.0, running=True)
        marks.mark(connection, "b", 3.0, running=False)
        assert marks.any(connection)
        assert [marks.has(connection, name) for name in "abc"] == [True, True, False]
        assert marks.to_stop(connection, ["a", "b", "c"]) == ["b"], "a later mark keeps the wish"
        marks.drop(connection, "b")
        assert not marks.has(connection, "b")


def test_old_marks_are_purged_and_damaged_ones_get_a_time(database):
    marks = LocalCancellations(database)
    with database.transaction() as connection:
        marks.mark(connection, "old", 1.0, running=False)
        marks.mark(connection, "damaged", 1.0, running=False)
        connection.execute("UPDATE cancellations SET at = 'never' WHERE task_id = 'damaged'")
        marks.purge(connection, 5.0, 9.0)
        assert [marks.has(connection, name) for name in ("old", "damaged")] == [False, True]
        marks.purge(connection, 10.0, 11.0)
        assert not marks.any(connection)
