"""The engine's tables: made once, and never by an older release over a newer one's."""

import sqlite3
from contextlib import closing

import pytest

from aztask import App
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


STEPS_OF_COMPONENTS = {
    "cancellations": 2,
    "controls": 1,
    "damaged_runs": 1,
    "dead_index": 1,
    "engine": 1,
    "file": 1,
    "owned_cancellations": 1,
    "owned_controls": 1,
    "owned_dead_index": 1,
    "owned_uniques": 1,
    "results": 6,
    "run_owners": 1,
    "schedule_owners": 1,
    "schedules": 1,
    "numbered": 1,
    "partitions": 1,
    "signed_checkpoints": 1,
    "signed_controls": 1,
    "signed_results": 1,
    "signed_workflows": 1,
    "uniques": 1,
    "workflow_owners": 1,
    "workflows": 1,
}


def test_no_component_has_a_further_step(tmp_path):
    """The release before refuses a file with more steps of a component than it knows: what is new
    is a component of its own, which it passes by.
    """
    address = f"local://{tmp_path}/queues.db"
    app = App("shop", broker=address, results=address)
    app.broker.declare("q")
    assert app.results.get("x") is None
    app.close()
    with closing(sqlite3.connect(tmp_path / "queues.db")) as connection:
        found = dict(connection.execute("SELECT component, version FROM components").fetchall())
    assert found == STEPS_OF_COMPONENTS
