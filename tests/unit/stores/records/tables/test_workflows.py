"""Documents in a table: whoever writes learns what is there, also when an answer is lost."""

from dataclasses import replace

import pytest
from azure.data.tables import TableEntity

from aztask.errors import BrokerUnavailable
from aztask.stores.records.tables import workflows as module
from aztask.stores.records.tables.workflows import TablesWorkflows
from aztask.stores.records.workflows import DocumentChange
from aztask.stores.tables.client import TimeBudget
from aztask.stores.tables.errors import OutcomeUnknown

PLAN = DocumentChange("w", "plan-1", b"plan")


class Table:
    """One row. `faults`: what happens to the next writes, "request" or "answer" is lost.

    `theirs`: data that another writer writes after the first fault.
    """

    def __init__(self, *faults, theirs=None):
        self.faults = list(faults)
        self.theirs = theirs
        self.row = None
        self.tag = 0
        self.writes = 0

    def each(self, call, work, items):
        return [work(call, each) for each in items]

    def insert(self, call, entity):
        return self._write(entity, self.row is None)

    def replace(self, call, entity, tag):
        return self._write(entity, self.row is not None and tag == str(self.tag))

    def _write(self, entity, allowed):
        self.writes += 1
        fault = self.faults.pop(0) if self.faults else ""
        if allowed and fault != "request":
            self._keep(entity)
        if fault:
            if self.theirs is not None:
                self._keep({**entity, "data": self.theirs})
                self.theirs = None
            raise OutcomeUnknown(BrokerUnavailable("the answer did not come"))
        return str(self.tag) if allowed else None

    def _keep(self, entity):
        self.row = dict(entity)
        self.tag += 1

    def read(self, call, partition, row, select=None):
        if self.row is None:
            return None
        entity = TableEntity(self.row)
        entity._metadata = {"etag": str(self.tag)}
        return entity


class Blobs:
    """Every value fits the row."""

    def place_at(self, call, partition, row, data):
        return data, ""

    def delete(self, *names):
        pass


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(module, "sleep", lambda seconds: None)


def store_on(table):
    return TablesWorkflows(table, Blobs())


@pytest.mark.parametrize(
    "faults", [["request"], ["answer"], ["request", "request"], ["request", "answer"]]
)
def test_a_new_document_is_there_whatever_was_lost(faults):
    """Who starts a workflow goes on after this: a plan that is missing then stays missing."""
    table = Table(*faults)
    assert store_on(table).write([PLAN]) != [None]
    assert table.row["data"] == b"plan"


@pytest.mark.parametrize("fault", ["request", "answer"])
def test_a_change_is_there_whatever_was_lost(fault):
    table = Table()
    store = store_on(table)
    (tag,) = store.write([PLAN])
    table.faults = [fault]
    assert store.write([replace(PLAN, data=b"next", tag=tag)]) != [None]
    assert table.row["data"] == b"next"


@pytest.mark.parametrize("fault", ["request", "answer"])
def test_another_writer_that_came_in_between_has_won(fault):
    table = Table(fault, theirs=b"theirs")
    assert store_on(table).write([PLAN]) == [None]
    assert table.row["data"] == b"theirs"


def test_a_document_that_is_there_already_is_not_written():
    table = Table()
    store = store_on(table)
    store.write([PLAN])
    assert store.write([PLAN]) == [None]
    assert table.writes == 2


def test_it_is_an_error_when_it_stays_unknown(monkeypatch):
    """Not None, which says that it is there."""
    monkeypatch.setattr(TimeBudget, "remaining", property(lambda self: 0.0))
    with pytest.raises(BrokerUnavailable):
        store_on(Table("request")).write([PLAN])
