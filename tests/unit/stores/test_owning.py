"""Rows of one owner become those of another, a window at a time."""

import pytest

from aztask.address.owner import Owner
from aztask.errors import BrokerUnavailable
from aztask.queues.engine import Database
from aztask.steps.records import STEPS
from aztask.stores.records.local.store import LocalResults
from aztask.stores.rows import Change, Place, move_rows

OLD, NEW = Owner("local://old"), Owner("local://new")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr("aztask.stores.rows.WINDOW", 2)
    return LocalResults(Database(str(tmp_path / "results.db"))).rows


def test_rows_of_several_windows_are_moved_and_those_that_exist_stay(store):
    rows = store.of(STEPS)
    for number in range(5):
        rows.write(Change(Place(OLD, "a", f"k{number}"), {"data": b"old"}))
    rows.write(Change(Place(NEW, "a", "k3"), {"data": b"new"}))
    assert move_rows(store, rows, OLD, NEW) == 5
    assert list(rows.of_owner(OLD)) == []
    found = {row.place.key: row.values["data"] for row in rows.of_owner(NEW)}
    assert found == {f"k{number}": b"new" if number == 3 else b"old" for number in range(5)}
    assert move_rows(store, rows, OLD, NEW) == 0


def test_rows_that_keep_changing_end_it_with_a_line(store, monkeypatch):
    rows = store.of(STEPS)
    rows.write(Change(Place(OLD, "a", "k"), {"data": b"old"}))
    monkeypatch.setattr(rows, "write", lambda change: None)  # another writer is always faster
    with pytest.raises(BrokerUnavailable, match="keep changing"):
        move_rows(store, rows, OLD, NEW)
