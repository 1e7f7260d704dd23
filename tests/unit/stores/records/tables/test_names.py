"""Names of rows and blobs: distinct, allowed, and in the right order."""

import pytest

from aztask.stores.layout import SHARDS, key_text, shard_of
from aztask.stores.records.base import RunKey
from aztask.stores.records.tables.names import (
    is_blob_of,
    is_row,
    is_run,
    key_of_row,
    partition_of,
    row_of,
)

IDS = ["a", "A", "a/b", "a_2f_b", "a#b", "ü", "\udc80", "x" * 300, "x" * 301, "_", "~x", ""]


def test_two_texts_never_have_one_key_and_every_key_is_allowed():
    keys = [key_text(each) for each in IDS]
    assert len(set(keys)) == len(IDS)
    for key in keys:
        assert len(key) <= 250
        assert not set("/\\#?") & set(key)
        assert key.isprintable()


@pytest.mark.parametrize("task_id", [each for each in IDS if len(each) < 100 and each != "~x"])
def test_a_short_id_can_be_read_back(task_id):
    key = RunKey(task_id, 2, 7)
    assert key_of_row(partition_of(task_id), row_of(key)) == key


def test_the_latest_run_comes_first():
    keys = [RunKey("a", 1, 0), RunKey("a", 0, 10), RunKey("a", 0, 9), RunKey("a", 0, 0)]
    assert sorted(map(row_of, keys)) == [row_of(key) for key in keys]


def test_only_our_own_names_are_trusted():
    partition, row = partition_of("a"), row_of(RunKey("a"))
    assert is_row(row)
    assert is_run(partition, row)
    assert not is_run(partition, row_of(RunKey("a"), "e"))
    assert not is_run("w", row)
    blob = f"2026112119/{partition}!{row}!{'0' * 32}"
    assert is_blob_of(blob, partition, row)
    assert is_blob_of("", partition, row)
    assert not is_blob_of(blob, partition_of("b"), row)
    assert 0 <= shard_of(partition) < SHARDS
