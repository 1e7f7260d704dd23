"""Settlements and decisions as values: what is recorded comes back equal."""

import pytest

from aztask.message.envelope import Envelope
from aztask.settlement import (
    REASON_LIMIT,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Hold,
    Lapse,
    Release,
    Resubmit,
    from_record,
    name_of,
    to_record,
    with_envelope,
)

ALL = [
    (Complete(), "complete"),
    (Abandon(), "abandon"),
    (Release(), "release"),
    (Defer(), "defer"),
    (Defer(2.0, 1002.0), "defer"),
    (Defer(2.0, 1002.0, counted=False), "defer"),
    (DeadLetter("why", "and how"), "dead-letter"),
    (Resubmit(2.0, 1002.0), "resubmit"),
    (Resubmit(2.0, 1002.0, counted=False, asked=True), "resubmit"),
    (Hold(2.0, 1002.0), "hold"),
    (Lapse(), "lapse"),
]


@pytest.mark.parametrize(("decision", "name"), ALL)
def test_a_record_comes_back_equal_under_its_name(decision, name):
    record = to_record(decision)
    assert record["settle"] == name == name_of(decision)
    assert from_record(record) == decision


def test_a_record_is_plain_data_without_what_need_not_be_said():
    assert to_record(Complete()) == {"settle": "complete"}
    assert to_record(DeadLetter("why")) == {
        "settle": "dead-letter", "reason": "why", "description": "",
    }  # fmt: skip
    waits = {"delay": 0.0, "due": None}
    assert to_record(Resubmit()) == {"settle": "resubmit", **waits, "counted": True}
    assert to_record(Defer()) == {"settle": "defer", **waits, "counted": True}
    assert to_record(Hold()) == {"settle": "hold", **waits}
    assert to_record(Resubmit(asked=True))["asked"] is True


def test_for_a_broker_a_resubmission_gets_its_clone_and_what_is_left_of_its_delay():
    decided = Resubmit(2.0, 1002.0, counted=False, asked=True)
    clone = Envelope(b"clone")
    ready = with_envelope(decided, clone, 0.5)
    assert ready == Resubmit(0.5, 1002.0, counted=False, asked=True, envelope=clone)
    assert decided.envelope is None
    assert to_record(ready) == to_record(Resubmit(0.5, 1002.0, counted=False, asked=True))


def test_what_is_no_record_is_an_error():
    with pytest.raises(KeyError):
        from_record({"settle": "vanish"})
    with pytest.raises(TypeError):
        from_record({"settle": "complete", "delay": 1})


@pytest.mark.parametrize(
    "record",
    [
        {"settle": "resubmit", "delay": "soon"},
        {"settle": "resubmit", "delay": -1.0},
        {"settle": "resubmit", "delay": float("nan")},
        {"settle": "resubmit", "delay": True},
        {"settle": "resubmit", "delay": 1e10},
        {"settle": "resubmit", "due": 1e300},
        {"settle": "resubmit", "due": "tomorrow"},
        {"settle": "resubmit", "counted": 1},
        {"settle": "resubmit", "asked": None},
        {"settle": "resubmit", "envelope": b"x"},
        {"settle": "hold", "delay": [1.0]},
        {"settle": "dead-letter", "reason": ["r"]},
        {"settle": "dead-letter", "reason": "r", "description": b"d"},
        {"settle": "dead-letter"},
        {"settle": ["complete"]},
        {"settle": None},
        {},
        [["settle", "complete", 1]],
        "complete",
        None,
        {1: 2},
        {"settle": "complete", 5: 1},
    ],
)
def test_a_forged_record_is_an_error(record):
    """Whatever it is made of: the settlement would be carried out."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_record(record)


def test_texts_are_cut_to_what_every_service_allows():
    dead = DeadLetter("r" * 2000, "d" * 2000)
    assert (len(dead.reason), len(dead.description)) == (REASON_LIMIT, REASON_LIMIT)


@pytest.mark.parametrize(("due", "good"), [(250_000_000_000.0, True), (250_000_000_001.0, False)])
def test_a_time_that_no_calendar_knows_is_no_settlement(due, good):
    """About the year 9892: later ones cannot be shown, and no service takes them."""
    record = {"settle": "resubmit", "delay": 1.0, "due": due}
    if good:
        assert from_record(record).due == due
    else:
        with pytest.raises(TypeError):
            from_record(record)


def test_a_dead_letter_tells_no_secret(monkeypatch):
    monkeypatch.setattr("aztask.support.display._known", {})  # other tests wrap many
    letter = DeadLetter("bad", "cannot open AccountKey=c2VjcmV0c2VjcmV0;x " + "y" * 2000)
    assert "c2VjcmV0" not in letter.description
    assert letter.description.startswith("cannot open AccountKey=****;x")
    assert len(letter.description) == REASON_LIMIT
