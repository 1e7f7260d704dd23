"""Notes of dead letters as rows of a table."""

import os

from aztask.message.envelope import Envelope
from aztask.results.deadindex import IndexedDeadLetter
from aztask.results.tables.dead import _entity, _is_gone, _key_in, _letter


def noted(body=b"x"):
    return IndexedDeadLetter(
        "default", Envelope(body, {"task": "shop.add"}, message_id="a:0:0"), "why", "what", 5.0, 2
    )


def test_a_note_is_read_back_however_long_its_envelope_is():
    for body in (b"x", os.urandom(200_000)):
        row = _entity(noted(body), 7)
        letter = _letter("default", row)
        assert (letter.key, letter.envelope.body, letter.number) == ("a:0:0", body, 7)
        assert (letter.reason, letter.description, letter.at) == ("why", "what", 5.0)
        assert row["parts"] == sum(name.startswith("envelope") for name in row)


def test_a_damaged_note_keeps_its_key():
    row = _entity(noted(), 7)
    for change in ({"parts": 1000}, {"why": b"\xc1"}, {"envelope0": b"\xc1"}, {"at": "x"}):
        letter = _letter("default", {**row, **change})
        assert letter.damage
        assert (letter.key, letter.number) == ("a:0:0", 7)
    assert _key_in(b"\xc1") is None


def test_a_note_is_gone_if_it_is_old_and_not_among_the_keys():
    row = _entity(noted(), 7)
    assert _is_gone(row, [], 6.0)
    assert not _is_gone(row, ["a:0:0"], 6.0)
    assert not _is_gone(row, [], 5.0)
    assert _is_gone({**row, "at": "x"}, ["b"], 5.0)
    assert not _is_gone({**row, "key": b"\xc1"}, ["b"], 6.0), "it goes with the last ones"
