"""Notes of dead letters, as any store keeps them."""

from types import SimpleNamespace

from aztask.brokers.local.payload import payload_of
from aztask.engine import Database
from aztask.message.envelope import Envelope
from aztask.results.deadindex import index_for, key_of, read_note
from aztask.results.local.store import LocalResults

ENVELOPE = Envelope(b"body", {"task": "shop.add"}, message_id="a:0:0")
NOTE = {
    "key": "a:0:0",
    "envelope": payload_of(ENVELOPE),
    "reason": "rejected",
    "description": "no such customer",
    "at": 5.0,
    "delivery_count": 2,
}


def test_the_key_is_the_message_id_or_a_digest_of_the_body():
    assert key_of(ENVELOPE) == "a:0:0"
    assert key_of(Envelope(b"x")) == key_of(Envelope(b"x", {"other": 1}))
    assert key_of(Envelope(b"x")) != key_of(Envelope(b"y"))


def test_a_note_is_read_back():
    letter = read_note("default", 3, NOTE)
    assert (letter.key, letter.reason, letter.at, letter.delivery_count, letter.number) == (
        "a:0:0",
        "rejected",
        5.0,
        2,
        3,
    )
    assert (letter.envelope.body, letter.damage) == (b"body", "")


def test_a_damaged_note_keeps_its_key():
    for change in ({"reason": 7}, {"envelope": b"\xc1"}, {"at": "never"}):
        letter = read_note("default", 3, {**NOTE, **change})
        assert letter.damage
        assert (letter.key, letter.number) == ("a:0:0", 3)
    other = read_note("default", 3, {**NOTE, "key": "b:0:0"})
    assert other.damage == "its envelope cannot be read"


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
