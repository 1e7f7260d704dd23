"""Runs by compare-and-set on a row: other writers, lost answers, and recorded ends."""

import pytest
from azure.data.tables import TableEntity

from aztask.errors import BrokerUnavailable
from aztask.settlement import Complete
from aztask.stores.records.base import (
    Finish,
    Outcome,
    Owned,
    OwnedElsewhere,
    Recorded,
    RunKey,
    Start,
    State,
)
from aztask.stores.records.tables.rows import RunRow
from aztask.stores.records.tables.runs import TRIES, Runs
from aztask.stores.tables.client import TimeBudget
from aztask.stores.tables.errors import OutcomeUnknown
from aztask.support.clock import SYSTEM_CLOCK

KEY = RunKey("a")


class Table:
    """One row, answered as the service answers; `lose` makes the next answers get lost."""

    def __init__(self):
        self.row = None
        self.tag = 0
        self.lose = 0
        self.conflicts = 0

    def insert(self, call, entity):
        if self.row is not None:
            return None
        return self._write(entity)

    def replace(self, call, entity, tag):
        if self.conflicts:
            self.conflicts -= 1
            self.tag += 1
        if self.row is None or tag != str(self.tag):
            return None
        return self._write(entity)

    def _write(self, entity):
        self.row = dict(entity)
        self.tag += 1
        if self.lose:
            self.lose -= 1
            raise OutcomeUnknown(BrokerUnavailable("reset"))
        return str(self.tag)

    def read(self, call, partition, row, select=None):
        if self.row is None:
            return None
        entity = TableEntity(self.row)
        entity._metadata = {"etag": str(self.tag)}
        return entity


class Blobs:
    """Every value fits the row."""

    def place_of(self, call, key, data):
        return data, ""

    def load(self, call, data, name):
        return data

    def delete(self, *names):
        pass


class Index(list):
    """Keeps which runs were noted."""

    def note(self, call, run: RunRow):
        self.append(run.key)


@pytest.fixture
def table():
    return Table()


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def runs(table, index):
    return Runs(table, Blobs(), index, None, SYSTEM_CLOCK)


def start(runs, owner="one", position=1):
    return runs.start(TimeBudget(), Start(KEY, "shop.add", "default", position, owner, "w", 1.0))


def record(runs, owner="one"):
    outcome = Outcome(State.SUCCEEDED, Complete(), b"value", at=2.0)
    return runs.record(TimeBudget(), Finish(KEY, owner, outcome))


def test_a_run_is_owned_once_and_its_end_is_recorded_once(runs, index):
    assert start(runs) == Owned(1)
    assert start(runs, "two", position=2) == OwnedElsewhere()
    assert record(runs)
    assert record(runs), "the same end again, after a lost answer"
    assert not record(runs, "two")
    answer = start(runs, "three")
    assert isinstance(answer, Recorded)
    assert answer.outcome.value == b"value"
    assert set(index) == {KEY}


def test_a_write_whose_answer_is_lost_counts_once(runs, table):
    table.lose = 1
    assert start(runs) == Owned(1)
    table.lose = 1
    assert record(runs)
    assert table.row["state"] == "succeeded"


def test_other_writers_are_waited_for_but_not_without_end(runs, table):
    start(runs)
    table.conflicts = TRIES - 1
    assert record(runs)
    table.row["state"], table.row["owner"] = "started", "one"
    for name in ("ended_at", "settlement", "body"):
        table.row.pop(name, None)
    table.conflicts = 10 * TRIES
    with pytest.raises(BrokerUnavailable, match="other writers keep changing"):
        record(runs)
