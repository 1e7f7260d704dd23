"""Entries of the quarantine, which may be damaged themselves."""

from aztask.stores.records.base import RunKey
from aztask.stores.records.tables.names import partition_of, row_of
from aztask.stores.records.tables.quarantine import _entry

ENTRY = {"at": 5.0, "partition": partition_of("a"), "row": row_of(RunKey("a"))}


def test_an_entry_names_a_row_of_a_run():
    assert _entry(ENTRY) == (5.0, ENTRY["partition"], ENTRY["row"])


def test_any_other_entry_names_none():
    for change in ({"at": "x"}, {"partition": 7}, {"partition": "w"}, {"row": "x"}):
        assert _entry({**ENTRY, **change}) is None
