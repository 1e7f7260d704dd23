"""When the states of sessions were last set."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.namespace import SessionTimes
from aztask.queues.engine import IN_MEMORY, Database


@pytest.fixture
def times():
    database = Database(IN_MEMORY)
    yield SessionTimes(database)
    database.close()


def test_the_last_time_counts(times):
    times.note("q", "one", 10.0)
    times.note("q", "two", 10.0)
    times.note("q", "one", 20.0)
    times.note("other", "three", 5.0)
    assert times.until("q", 9.0) == set()
    assert times.until("q", 10.0) == {"two"}
    assert times.until("q", 20.0) == {"one", "two"}


def test_sessions_and_queues_are_forgotten(times):
    for queue in ("q", "other"):
        times.note(queue, "one", 1.0)
        times.note(queue, "two", 1.0)
    times.forget("q", "one")
    assert times.until("q", 9.0) == {"two"}
    times.forget("q")
    assert times.until("q", 9.0) == set()
    assert times.until("other", 9.0) == {"one", "two"}
