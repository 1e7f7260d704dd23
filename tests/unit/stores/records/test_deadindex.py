"""Notes of dead letters, as rows of a store."""

from types import SimpleNamespace

import msgpack
import pytest
from rowmodel import ModelStore

from aztask.address.owner import NO_OWNER, Owner
from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.queues.local.payload import payload_of
from aztask.stores.records import deadindex
from aztask.stores.records.deadindex import (
    NOTES,
    DeadIndex,
    IndexedDeadLetter,
    index_for,
    key_of,
    payload_of_dead,
)
from aztask.stores.records.local.store import LocalResults

MINE = Owner("storage://mine", "shop")
THEIRS = Owner("storage://theirs")
ENVELOPE = Envelope(b"body", {"task": "shop.add"}, message_id="a:0:0")


@pytest.fixture
def store():
    return ModelStore()


@pytest.fixture
def index(store):
    return DeadIndex(store)


def letter(key, at=1.0, reason="rejected"):
    return IndexedDeadLetter("default", Envelope(b"x", message_id=key), reason, "", at, 1)


def change(store, **changes):
    (place,) = store.of(NOTES).rows
    store.of(NOTES).put(place, {**store.of(NOTES).rows[place][0], **changes})


def test_the_key_is_the_message_id_or_a_digest_of_the_body():
    assert key_of(ENVELOPE) == "a:0:0"
    assert key_of(Envelope(b"x")) == key_of(Envelope(b"x", {"other": 1}))
    assert key_of(Envelope(b"x")) != key_of(Envelope(b"y"))


def test_headers_that_cannot_be_written_are_dropped():
    strange = Envelope(b"x", {"odd": object()}, message_id="a")
    assert payload_of_dead(strange) == payload_of_dead(Envelope(b"x", message_id="a"))


def test_a_note_holds_the_whole_message(index):
    """Arguments too: docs/security.md says so."""
    noted = IndexedDeadLetter("default", ENVELOPE, "rejected", "no such customer", 5.0, 2)
    index.note([noted])
    assert list(index.notes("default")) == [noted]


def test_a_reason_may_be_any_text(index):
    index.note([letter("a", reason="no \ud800")])
    (noted,) = index.notes("default")
    assert noted.reason == "no ?"


@pytest.mark.parametrize(
    "damage",
    [
        {"reason": 7},
        {"description": None},
        {"envelope": b"\xc1"},
        {"envelope": None},
        {"envelope": msgpack.packb([1, "text", *msgpack.unpackb(payload_of(ENVELOPE))[2:]])},
        {"envelope": msgpack.packb([1, b"x", [], *msgpack.unpackb(payload_of(ENVELOPE))[3:]])},
        {"envelope": payload_of(ENVELOPE)},
        {"at": "never"},
        {"delivery_count": -1},
    ],
)
def test_a_damaged_note_keeps_its_key(store, index, damage):
    index.note([letter("a")])
    change(store, **damage)
    (noted,) = index.notes("default")
    assert noted.damage.isprintable()
    assert noted.damage
    assert noted == IndexedDeadLetter(
        "default", Envelope(b"", message_id="a"), "", "", 0.0, 0, noted.damage
    )


def test_a_note_is_kept_while_it_is_young_or_among_the_keys(store, index):
    index.note([letter("a", at=5.0)])
    assert index.keep_only("default", ["a"], 6.0) == 0
    assert index.keep_only("default", ["b"], 5.0) == 0
    assert index.keep_only("default", ["b"], 5.1) == 1
    index.note([letter("a", at=5.0)])
    change(store, at="x")
    assert index.keep_only("default", ["b"], 5.0) == 1, "a damaged time is old"


def test_a_note_with_a_damaged_key_goes_with_the_last_ones(store, index):
    index.note([letter("")])
    rows = store.of(NOTES).rows
    ((place, row),) = rows.items()
    del rows[place]
    rows[place._replace(key="")] = row
    assert index.keep_only("default", ["b"], 6.0) == 0
    assert index.keep_only("default", [], 6.0) == 1


def test_what_another_program_wrote_ends_no_listing(store, index):
    """Rows without a number of ours, of which a whole page may consist."""
    index.note([letter("a")])
    (place,) = store.of(NOTES).rows
    values, *rest = store.of(NOTES).rows[place]
    for number in range(3):
        other = {**values, "number": None}
        store.of(NOTES).rows[place._replace(key=f"{number}")] = (other, *rest)
    assert [each.key for each in index.notes("default")] == ["a"]


def keys(index, queue="default"):
    return [each.key for each in index.notes(queue)]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.setattr(deadindex, "PAGE", 2)
    monkeypatch.setattr(deadindex, "SHORT_PAGE", 3)


@pytest.mark.parametrize("owner", [NO_OWNER, MINE])
def test_notes_come_page_by_page_in_the_order_in_which_they_were_made(store, pages, owner):
    index = DeadIndex(store, owner)
    for number in (3, 1, 4, 0, 2):
        index.note([letter(f"{number}", at=number), letter("3", at=9.0)])
        assert keys(index)[-1] == f"{number}"
    assert keys(index) == list("31402")
    assert keys(DeadIndex(store, THEIRS)) == (list("31402") if owner is NO_OWNER else [])
    assert keys(index, "other") == []
    index.drop("default", ["1", "unknown"])
    index.drop("other", ["3"])
    assert index.keep_only("default", {"4", "3"}, 2.0) == 1
    assert keys(index) == list("342")
    assert index.keep_only("default", (), 10.0) == 3
    assert index.owners() == set()


def test_notes_without_an_owner_come_last_until_the_whole_queue_was_read(store, pages):
    former, mine = DeadIndex(store), DeadIndex(store, MINE)
    former.note([letter(each, at=5.0) for each in "abcde"])
    former.note([letter("f", at=50.0)])
    mine.note([letter("x"), letter("b")])
    assert keys(mine) == list("xbacdef")
    assert keys(former) == list("abcdef")
    mine.drop("default", ["a"])
    assert keys(former) == list("bcdef")
    assert mine.keep_only("default", {"b", "c", "x"}, 9.0) == 0
    assert keys(mine) == list("xbcf"), "theirs are no longer listed, but young ones are"
    assert keys(former) == list("def")
    assert mine.keep_only("default", {"b", "c", "x"}, 7.0) == 0
    assert keys(mine) == list("xbcf"), "it was read until later"
    mine.keep_only("default", {"b", "c", "x"}, 51.0)
    assert keys(mine) == list("xbc")
    assert keys(DeadIndex(store, THEIRS)) == list("def")
    assert (mine.unowned(5.0), mine.unowned(5.1), mine.unowned(60.0)) == (0, 2, 3)
    assert mine.owners() == {MINE.of_broker, NO_OWNER}


def test_a_damaged_note_without_an_owner_is_not_taken(store):
    former, mine = DeadIndex(store), DeadIndex(store, MINE)
    former.note([letter("a")])
    change(store, at="x")
    mine.keep_only("default", {"a"}, 9.0)
    assert keys(mine) == keys(former) == [], "its dead letter is in its queue"


def test_notes_are_adopted_and_those_that_are_there_stay(store):
    theirs, mine = DeadIndex(store, THEIRS), DeadIndex(store, MINE)
    DeadIndex(store).note([letter("old")])
    theirs.keep_only("default", (), 9.0)
    for each in "cab":
        theirs.note([letter(each)])
    mine.note([letter("a", reason="mine")])
    assert mine.adopt(MINE) == mine.adopt(Owner(MINE.broker, "former")) == 0
    assert DeadIndex(store).adopt(MINE) == 0
    assert mine.adopt(THEIRS) == 3
    assert mine.adopt(THEIRS) == 0
    assert sorted(keys(mine)) == ["a", "b", "c", "old"]
    assert [each.reason for each in mine.notes("default") if each.key == "a"] == ["mine"]
    assert mine.owners() == {MINE.of_broker, NO_OWNER}
    assert keys(theirs) == ["old"], "what it had read is remembered no more"
    assert mine.adopt(NO_OWNER) == 1
    assert keys(theirs) == []


def test_only_a_service_that_shows_few_needs_an_index():
    database = Database(":memory:")
    results = LocalResults(database)

    def broker(**able):
        return SimpleNamespace(capabilities=SimpleNamespace(**able))

    few = broker(paged_peek=False, native_dead_letter=False)
    assert index_for(few, results) is results.dead_index
    assert index_for(few, None) is None
    assert index_for(broker(paged_peek=True, native_dead_letter=False), results) is None
    assert index_for(broker(paged_peek=False, native_dead_letter=True), results) is None
    database.close()
