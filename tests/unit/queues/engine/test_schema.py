"""The engine's tables: made once, and never by an older release over a newer one's."""

import pytest

from aztask.errors import ConfigurationError
from aztask.queues.engine import Database, Engine
from aztask.queues.engine.queues import COMPONENT, STEPS


@pytest.fixture
def database():
    made = Database(":memory:")
    yield made
    made.close()


def test_the_steps_are_taken_once(database):
    Engine(database).create_queue("q")
    assert Engine(database).queues() == ["q"]
    with database.read() as connection:
        (version,) = connection.execute(
            "SELECT version FROM components WHERE component = ?", (COMPONENT,)
        ).fetchone()
    assert version == len(STEPS)


def test_a_file_of_a_newer_release_is_refused(database):
    database.migrate(COMPONENT, [*STEPS, "CREATE TABLE later (i)"])
    with pytest.raises(ConfigurationError, match="newer aztask"):
        Engine(database)


def test_sequence_numbers_and_queue_ids_are_never_used_twice(database):
    database.migrate(COMPONENT, STEPS)
    with database.read() as connection:
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_schema").fetchall())
    assert "seq INTEGER PRIMARY KEY AUTOINCREMENT" in tables["messages"]
    assert "id INTEGER PRIMARY KEY AUTOINCREMENT" in tables["queues"]


def test_columns_that_change_come_before_the_payload(database):
    database.migrate(COMPONENT, STEPS)
    with database.read() as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info (messages)")]
    assert columns[-1] == "payload"
