"""One dead letter, printed for people and as JSON."""

import json

import pytest

from aztask.message.envelope import Envelope
from aztask.operate.cli.letters import SHOWN_BYTES, print_letter, summary
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.settlement import DeadLetter

ALL = Selection(frozenset(), None, None, everything=True)


@pytest.fixture
def app(cli):
    return cli.app()


def letter(app):
    """The one message of "default", dead-lettered."""
    receiver = app.broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 1.0)
    receiver.settle([(delivery, DeadLetter("rejected", "no\x1b[31m stock"))])
    (found,) = DeadLetters(app, "default").find(ALL)
    return found


def test_the_summary_of_a_task(app):
    app.send("shop.add", [1], task_id="a")
    made = summary(letter(app))
    assert (made["id"], made["task"], made["reason"]) == ("a", "shop.add", "rejected")
    assert (made["delivery_count"], made["resubmit_count"], made["generation"]) == (1, 0, 0)


def test_everything_for_people(app, capsys):
    app.send("shop.add", [1], {"b": "\x1b[31m"}, task_id="a")
    print_letter(app, letter(app), as_json=False)
    out = capsys.readouterr().out
    assert "task:        shop.add" in out
    assert "args:        [1]" in out
    assert "\x1b" not in out
    assert "body:" not in out


def test_everything_as_json(app, capsys):
    app.send("shop.add", [1], {"b": 2}, task_id="a")
    print_letter(app, letter(app), as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert (record["args"], record["kwargs"]) == ([1], {"b": 2})
    assert record["headers"]["id"] == "a"


def test_a_body_that_cannot_be_decoded_is_shown_in_part(app, capsys):
    app.broker.send("default", [Envelope(b"\xff" * (SHOWN_BYTES + 44), message_id="odd")])
    print_letter(app, letter(app), as_json=False)
    out = capsys.readouterr().out
    assert "problem:" in out
    assert r"b'\xff" in out
    assert "and 44 more bytes (--json shows all)" in out
