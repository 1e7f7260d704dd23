"""Marks of cancelled tasks in a table."""

import pytest

from aztask.stores.layout import SHARDS, shard_of
from aztask.stores.records.tables import marks as module
from aztask.stores.records.tables.marks import CancellationMarks
from aztask.stores.records.tables.names import partition_of
from aztask.stores.tables.client import TimeBudget


class Table:
    """Rows in a dict, which answers the queries of marks."""

    def __init__(self):
        self.rows = {}

    def put(self, call, entity):
        self.rows[entity["PartitionKey"], entity["RowKey"]] = dict(entity)

    def ensure(self, call, entity):
        self.rows.setdefault((entity["PartitionKey"], entity["RowKey"]), dict(entity))

    def read(self, call, partition, row):
        return self.rows.get((partition, row))

    def delete(self, call, partition, row, tag=""):
        return self.rows.pop((partition, row), None) is not None

    def query(self, call, text, values, limit, select=None):
        running = "running eq true" in text
        found = [
            row
            for (partition, _), row in sorted(self.rows.items())
            if partition == values["marks"]
            and (row["running"] or not running)
            and ("before" not in values or row["at"] < values["before"])
            and ("task" not in values or row["RowKey"] in (values["own"], values["task"]))
        ]
        return found[:limit]

    def each(self, call, work, items):
        return [work(call, item) for item in items]


@pytest.fixture
def marks():
    return CancellationMarks(Table())


def has(marks, task_id):
    return marks.has(TimeBudget(), partition_of(task_id))


def test_a_mark_is_found_and_a_later_one_keeps_the_request_to_stop(marks):
    marks.put("a", 1.0, running=False)
    marks.put("b", 1.0, running=True)
    marks.put("b", 2.0, running=False)
    assert [has(marks, task_id) for task_id in "abc"] == [True, True, False]
    assert marks.to_stop(["c", "b", "a"]) == ["b"]
    marks.drop(TimeBudget(), partition_of("a"))
    assert not has(marks, "a")


def test_a_shard_with_more_marks_than_a_page_is_asked_for_each(marks, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    names = [f"t{number}" for number in range(40)]
    for name in names:
        marks.put(name, 1.0, running=False)
    call = TimeBudget()
    pages = {shard: marks.page(call, shard) for shard in range(SHARDS)}
    partitions = [partition_of(name) for name in (*names, "unmarked")]
    assert marks.among(call, partitions, pages) >= set(partitions[:-1])
    assert partitions[-1] not in marks.among(call, partitions, pages)
    assert len({shard_of(each) for each in partitions}) == SHARDS


def test_old_marks_are_purged(marks):
    marks.put("old", 1.0, running=True)
    marks.put("new", 9.0, running=True)
    marks.purge(5.0)
    assert (has(marks, "old"), has(marks, "new")) == (False, True)
