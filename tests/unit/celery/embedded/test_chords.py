"""Chords count their members once, whatever the order and however often they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aztask.celery.embedded.chords import ChordPart, Chords, chord_name
from aztask.queues.engine import Database
from aztask.stores.records.damage import Damaged
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.workflows import DocumentChange, WorkflowStore


@pytest.fixture
def chords(tmp_path: Path) -> Chords:
    return Chords(LocalResults(Database(str(tmp_path / "results.db"))).workflows)


def test_the_last_member_gets_all_parts_in_order(chords: Chords) -> None:
    chords.start("g", 3)
    assert not chords.ended("g", ChordPart(2, "c", b"2")).full
    assert not chords.ended("g", ChordPart(0, "a", b"0")).full
    full = chords.ended("g", ChordPart(1, "b", None, "ValueError: no"))
    assert full.full and not full.sent
    assert [part.index for part in full.parts] == [0, 1, 2]
    assert full.parts[1] == ChordPart(1, "b", None, "ValueError: no")


def test_a_member_that_ends_twice_counts_once_and_keeps_its_first_end(chords: Chords) -> None:
    chords.start("g", 2)
    chords.ended("g", ChordPart(0, "a", b"first"))
    assert not chords.ended("g", ChordPart(0, "a", b"second")).full
    full = chords.ended("g", ChordPart(1, "b", b"1"))
    assert [part.value for part in full.parts] == [b"first", b"1"]
    assert chords.ended("g", ChordPart(1, "b", b"1")) == full, "a repeated end acts again"


def test_the_size_may_come_last(chords: Chords) -> None:
    chords.start("g")
    for index in range(2):
        assert not chords.ended("g", ChordPart(index, "a", b"")).full
    assert chords.start("g", 2).full


def test_starting_again_changes_nothing(chords: Chords) -> None:
    chords.start("g", 1)
    chords.ended("g", ChordPart(0, "a", b"0"))
    assert chords.start("g").full


def test_a_body_is_noted_as_sent(chords: Chords) -> None:
    chords.start("g", 1)
    chords.ended("g", ChordPart(0, "a", b"0"))
    chords.note_sent("g")
    assert chords.ended("g", ChordPart(0, "a", b"0")).sent


def test_an_unknown_chord_is_none(chords: Chords) -> None:
    assert chords.ended("g", ChordPart(0, "a", b"")) is None
    assert chords._store.read([(chord_name("g"), "part-0")]) == [None], "nothing is left behind"
    assert not chords.known("g")


def test_members_that_end_at_once_fill_it_once_each(chords: Chords) -> None:
    chords.start("g", 16)
    full = []

    def end(index: int) -> None:
        if chords.ended("g", ChordPart(index, str(index), b"")).full:
            full.append(index)

    threads = [threading.Thread(target=end, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert full and chords.state("g").full
    assert len(chords.state("g").parts) == 16


class Counting:
    """A store that notes what it is asked, and lets another member end before a write."""

    def __init__(self, store: WorkflowStore) -> None:
        self._store = store
        self.asked: list[str] = []
        self.before_write: Callable[[], object] | None = None

    def read(self, keys: Sequence[tuple[str, str]]) -> Any:
        self.asked.append("read")
        return self._store.read(keys)

    def write(self, changes: Sequence[DocumentChange]) -> Any:
        self.asked.append("write")
        between, self.before_write = self.before_write, None
        if between is not None:
            between()
        return self._store.write(changes)


def test_the_end_of_a_member_reads_the_chord_once(chords: Chords) -> None:
    """On Azure Tables each of these is a request, in the way of every member."""
    chords.start("g", 3)
    store = Counting(chords._store)
    assert not Chords(store).ended("g", ChordPart(0, "a", b"0")).full
    assert store.asked == ["read", "write", "write"]


def test_a_member_that_ends_between_is_not_lost(chords: Chords) -> None:
    chords.start("g", 2)
    store = Counting(chords._store)
    store.before_write = lambda: chords.ended("g", ChordPart(1, "b", b"1"))
    assert Chords(store).ended("g", ChordPart(0, "a", b"0")).full


def test_it_is_deleted_with_what_has_ended(chords: Chords) -> None:
    chords.start("g", 1)
    store = chords._store
    [listed] = store.ended_workflows(10)
    assert listed.workflow == chord_name("g")
    assert store.delete_workflow(listed) and not chords.known("g")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x94\x02\x01\x90\xc2",
        b"\x94\x01\xa1a\x90\xc2",
        b"\x94\x01\x01\x91\xa1a\xc2",
    ],
)
def test_a_damaged_document_is_named(chords: Chords, data: bytes) -> None:
    chords.start("g", 1)
    tag = chords._store.read([(chord_name("g"), "chord")])[0].tag
    chords._store.write([DocumentChange(chord_name("g"), "chord", data, tag)])
    with pytest.raises(Damaged):
        chords.state("g")


def test_an_added_member_counts_beside_the_one_whose_index_it_has(chords: Chords) -> None:
    """Celery sends it with the index of the member that added it, and before that one has ended."""
    chords.start("g")
    chords.add("g", "further")
    chords.start("g", 2)
    assert not chords.ended("g", ChordPart(0, "further", b"30")).full
    assert not chords.ended("g", ChordPart(0, "a", b"1")).full
    full = chords.ended("g", ChordPart(1, "b", b"4"))
    assert full is not None and full.full
    assert [part.value for part in full.parts] == [b"1", b"4", b"30"]
    assert chords.ended("g", ChordPart(0, "further", b"31")) == full


def test_a_worker_of_an_earlier_release_reads_a_chord_without_added_members(
    chords: Chords, tmp_path: Path
) -> None:
    chords.start("g", 2)
    store = LocalResults(Database(str(tmp_path / "results.db"))).workflows
    (document,) = store.read([(chord_name("g"), "chord")])
    assert document is not None and len(msgpack.unpackb(document.data)) == 4
