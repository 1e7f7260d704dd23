"""Group commit."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.dispatch import Committer, StoreChange
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.queues.engine import IN_MEMORY, Database


class Insert(StoreChange):
    """Inserts a number, then raises `error` if there is one."""

    def __init__(self, number, log, error=None):
        self.number, self.log, self.error = number, log, error

    def execute(self):
        with Store.database.transaction() as connection:
            connection.execute("INSERT INTO t VALUES (?)", (self.number,))
        if self.error:
            raise self.error

    def succeed(self):
        self.log.append(("committed", self.number))

    def fail(self, error):
        self.log.append((type(error).__name__, self.number))


class Store:
    """The database of the running test."""

    database = None


@pytest.fixture
def turns():
    """(committer, the calls of the loop's next turn, the rows that are committed)"""
    database = Store.database = Database(IN_MEMORY)
    with database.transaction() as connection:
        connection.execute("CREATE TABLE t (number)")
    calls = []
    committer = Committer(database, calls.append)

    def rows():
        with database.read() as connection:
            return sorted(n for (n,) in connection.execute("SELECT number FROM t"))

    yield committer, calls, rows
    database.close()


def test_changes_of_a_turn_are_committed_together_and_answered_afterwards(turns):
    committer, calls, rows = turns
    log = []
    committer.after_flush = lambda: log.append("written")
    committer.submit(Insert(1, log))
    committer.submit(Insert(2, log))
    assert len(calls) == 1
    assert (log, rows()) == ([], [])
    calls.pop()()
    assert log == [("committed", 1), ("committed", 2), "written"]
    assert rows() == [1, 2]


def test_one_bad_change_fails_alone(turns):
    committer, calls, rows = turns
    log = []
    for number, error in ((1, None), (2, ConfigurationError("bad")), (3, None)):
        committer.submit(Insert(number, log, error))
    calls.pop()()
    assert log == [("committed", 1), ("ConfigurationError", 2), ("committed", 3)]
    assert rows() == [1, 3]


def test_an_unavailable_store_fails_all_at_once(turns):
    committer, calls, rows = turns
    log = []
    committer.submit(Insert(1, log))
    committer.submit(Insert(2, log, BrokerUnavailable("locked")))
    calls.pop()()
    assert log == [("BrokerUnavailable", 1), ("BrokerUnavailable", 2)]
    assert rows() == []


def test_deliveries_are_collected_in_the_transaction_and_made_after_it(turns):
    committer, calls, _ = turns
    log = []

    class Collector:
        def due(self):
            return True

        def collect(self):
            log.append("collected")
            return [lambda: log.append("delivered")]

        def rolled_back(self):
            log.append("rolled back")

    committer.collector = Collector()
    committer.submit(Insert(1, log))
    calls.pop()()
    assert log == ["collected", ("committed", 1), "delivered"]
    log.clear()
    committer.submit(Insert(2, log, ConfigurationError("bad")))
    calls.pop()()
    assert log == ["rolled back", ("ConfigurationError", 2)]


@pytest.mark.parametrize("now", [True, False])
def test_while_a_client_is_read_the_flush_waits(turns, now):
    committer, calls, rows = turns
    committer.reading = True
    committer.submit(Insert(1, []))
    assert calls == []
    committer.finish_reading(now=now)
    assert rows() == ([1] if now else [])
    assert len(calls) == (0 if now else 1)


def test_a_flush_that_is_planned_during_a_flush_follows_it(turns):
    committer, calls, rows = turns
    log = []

    class Twice(Insert):
        def succeed(self):
            committer.submit(Insert(2, log))

    committer.submit(Twice(1, log))
    calls.pop()()
    assert rows() == [1]
    calls.pop()()
    assert rows() == [1, 2]


def test_a_bug_in_one_change_harms_no_other(turns, caplog):
    committer, calls, rows = turns
    log = []
    for number, error in ((1, None), (2, KeyError("bug")), (3, None)):
        committer.submit(Insert(number, log, error))
    calls.pop()()
    assert log == [("committed", 1), ("AztaskError", 2), ("committed", 3)]
    assert rows() == [1, 3]
    assert len(caplog.records) == 1


def test_an_answer_that_cannot_be_written_keeps_no_other_back(turns, caplog):
    committer, calls, _ = turns
    log = []

    class Broken(Insert):
        def succeed(self):
            raise KeyError("bug")

    committer.after_flush = lambda: log.append("written")
    committer.submit(Broken(1, log))
    committer.submit(Insert(2, log))
    calls.pop()()
    assert log == [("committed", 2), "written"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [KeyError("bug"), ConfigurationError("bad")])
def test_a_change_is_made_although_the_deliveries_of_its_turn_fail(turns, error):
    committer, calls, rows = turns
    log = []

    class Collector:
        def due(self):
            return True

        def collect(self):
            raise error

        def rolled_back(self):
            log.append("rolled back")

    committer.collector = Collector()
    committer.submit(Insert(1, log))
    calls.pop()()
    assert log == ["rolled back", ("committed", 1)]
    assert rows() == [1]
