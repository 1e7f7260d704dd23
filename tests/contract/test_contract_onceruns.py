"""Notes of at-most-once runs in every store of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.base import RunKey
from aztask.stores.records.onceruns import Noted, OnceBeat, OnceRun, OnceRuns
from aztask.stores.rows import TOGETHER, RowStore

MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
THEIRS = Owner("servicebus://theirs.servicebus.windows.net", "shop")
RUN = OnceRun(RunKey("a/b?#\\ä", 1, 2), "shop.pay", "orders", "pod-0", "1f", 1_800_000_000.5, 60.0)


@pytest.fixture(params=[NO_OWNER, MINE], ids=["no owner", "owner"])
def notes(request: pytest.FixtureRequest, rows: RowStore) -> OnceRuns:
    return OnceRuns(rows, request.param)


def test_a_note_is_read_until_it_is_dropped(notes: OnceRuns) -> None:
    long = replace(RUN, key=RunKey("x" * 600), worker="w" * 400)
    for run in (RUN, long):
        notes.note([run])
    assert set(notes.all()) == {RUN, long}
    notes.drop([RUN])
    notes.drop([RUN])
    assert list(notes.all()) == [long]


def test_more_than_one_transaction(notes: OnceRuns) -> None:
    runs = [replace(RUN, key=RunKey(f"t{number}")) for number in range(TOGETHER + 3)]
    notes.note(runs)
    assert set(notes.all()) == set(runs)
    notes.drop(runs)
    assert list(notes.all()) == []


def test_a_repeated_claim_notes_again(notes: OnceRuns) -> None:
    again, other = replace(RUN, at=RUN.at + 60), replace(RUN, key=RunKey("other"))
    notes.note([RUN])
    notes.note([again, other])
    assert set(notes.all()) == {again, other}


def test_workers_have_notes_of_their_own(notes: OnceRuns) -> None:
    """The run was taken over: what one worker deletes is not the other's note."""
    other = replace(RUN, worker="pod-1")
    notes.note([RUN])
    notes.note([other])
    notes.drop([RUN])
    assert list(notes.all()) == [other]


def test_a_note_that_was_replaced_is_not_the_one_that_was_read(notes: OnceRuns) -> None:
    again = replace(RUN, at=RUN.at + 60, incarnation="2e")
    notes.note([RUN])
    notes.note([again])
    notes.drop_unchanged(RUN)
    assert list(notes.all()) == [again]
    for _ in range(2):
        notes.drop_unchanged(again)
        assert list(notes.all()) == []


def test_each_incarnation_has_a_heartbeat(notes: OnceRuns) -> None:
    first, twin = OnceBeat(("pod-0", "1f"), 10.5), OnceBeat(("pod-0", "2e"), 11.0)
    other = OnceBeat(("pod-1/\\ä", "1f"), 12.0)
    for beat in (first, twin, other):
        notes.beat(beat)
    notes.note([RUN])
    assert notes.read() == Noted([RUN], {beat.life: beat for beat in (first, twin, other)})
    again = first._replace(at=15.5)
    notes.beat(again)
    notes.drop_beat(first)
    notes.remove_beat(twin.life)
    notes.remove_beat(twin.life)
    assert notes.read() == Noted([RUN], {beat.life: beat for beat in (again, other)})
    notes.drop_beat(again)
    assert set(notes.read().beats) == {other.life}


def test_notes_belong_to_a_broker(rows: RowStore) -> None:
    mine, theirs = OnceRuns(rows, MINE), OnceRuns(rows, THEIRS)
    theirs.note([RUN])
    assert list(mine.all()) == []
    assert mine.adopt(THEIRS) == 1
    assert list(mine.all()) == [RUN]
    assert list(theirs.all()) == []
