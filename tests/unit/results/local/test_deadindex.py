"""The index of dead letters in a file."""

import pytest

from aztask.engine import Database
from aztask.message.envelope import Envelope
from aztask.results.deadindex import IndexedDeadLetter
from aztask.results.local.deadindex import LocalDeadIndex, payload_of_dead


@pytest.fixture
def index():
    database = Database(":memory:")
    yield LocalDeadIndex(database)
    database.close()


def letter(key, queue="default", at=1.0, reason="rejected"):
    return IndexedDeadLetter(queue, Envelope(b"x", message_id=key), reason, "", at, 1)


def keys(index, queue="default"):
    return [each.key for each in index.page(queue, 0, 100)]


def test_notes_are_paged_in_order_and_the_first_one_stays(index):
    index.note([letter("a"), letter("b", queue="other"), letter("c")])
    index.note([letter("a", reason="expired")])
    first, second = index.page("default", 0, 100)
    assert (first.key, first.reason, second.key) == ("a", "rejected", "c")
    assert [each.key for each in index.page("default", first.number, 1)] == ["c"]


def test_notes_are_dropped_by_key_or_because_their_dead_letter_is_gone(index):
    index.note([letter("a"), letter("b"), letter("c"), letter("new", at=9.0)])
    index.drop("default", ["a", "unknown"])
    assert keys(index) == ["b", "c", "new"]
    assert index.keep_only("default", ["c"], 5.0) == 1
    assert keys(index) == ["c", "new"]


def test_headers_that_cannot_be_written_are_dropped():
    strange = Envelope(b"x", {"odd": object()}, message_id="a")
    assert payload_of_dead(strange) == payload_of_dead(Envelope(b"x", message_id="a"))


def test_a_note_holds_the_whole_message(index):
    """Arguments too: docs/security.md says so."""
    index.note([letter("with-arguments")])
    (noted,) = index.page("default", 0, 10)
    assert noted.envelope == letter("with-arguments").envelope
    assert noted.envelope.body
