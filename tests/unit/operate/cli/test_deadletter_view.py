"""One dead letter, printed for people and as JSON."""

import json
from dataclasses import replace
from typing import Annotated

import pytest

from aztask import Secret
from aztask.message.envelope import Envelope
from aztask.message.headers import SAVED
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
    print_letter(app, letter(app), as_json=False, values=True)
    out = capsys.readouterr().out
    assert "task:        shop.add" in out
    assert "args:        [1]" in out
    assert "\x1b" not in out
    assert "body:" not in out


def test_everything_as_json(app, capsys):
    app.send("shop.add", [1], {"b": 2}, task_id="a")
    print_letter(app, letter(app), as_json=True, values=True)
    record = json.loads(capsys.readouterr().out)
    assert (record["args"], record["kwargs"]) == ([1], {"b": 2})
    assert record["headers"]["id"] == "a"


@pytest.mark.parametrize("as_json", [True, False])
def test_arguments_are_hidden_unless_asked_for(app, capsys, as_json):
    """Also in the headers for Celery's tools, and in that of a checkpoint."""
    app.send("shop.add", ["SECRET"], {"b": "SECRET"}, task_id="a")
    found = letter(app)
    told = {"argsrepr": "SECRET", "kwargsrepr": "SECRET", SAVED: b"SECRET"}
    headers = {**found.envelope.headers, **told}
    found = replace(found, envelope=replace(found.envelope, headers=headers))
    print_letter(app, found, as_json=as_json, values=False)
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert out.count("(hidden; --values shows it)") == (3 if as_json else 5)
    print_letter(app, found, as_json=as_json, values=True)
    assert capsys.readouterr().out.count("SECRET") >= 4  # the checkpoint is in base64


@pytest.mark.parametrize("as_json", [True, False])
def test_secret_arguments_are_hidden_even_if_values_are_asked_for(app, capsys, as_json):
    """With what else holds them: the body, the headers for Celery's tools, a checkpoint."""

    def charge(card: Annotated[str, Secret], cents: int) -> None: ...

    app.task(name="shop.charge")(charge)
    app.send("shop.charge", ["SECRET", 500], task_id="a")
    found = letter(app)
    told = {"argsrepr": "SECRET", "kwargsrepr": "SECRET", SAVED: b"SECRET"}
    found = replace(
        found,
        envelope=replace(found.envelope, headers={**found.envelope.headers, **told}),
    )
    print_letter(app, found, as_json=as_json, values=True)
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert "500" in out and "****" in out
    assert '"body":' not in out
    odd = replace(found, message=replace(found.message, body=b"\xc1SECRET"))
    print_letter(app, odd, as_json=as_json, values=True)
    assert "SECRET" not in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [True, False])
def test_a_body_that_cannot_be_decoded_is_hidden_unless_asked_for(app, capsys, as_json):
    app.broker.send("default", [Envelope(b"\xc1SECRET", message_id="odd")])
    print_letter(app, letter(app), as_json=as_json, values=False)
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert ('"body_bytes": 7' if as_json else "7 bytes (hidden") in out


def test_a_body_that_cannot_be_decoded_is_shown_in_part(app, capsys):
    app.broker.send("default", [Envelope(b"\xff" * (SHOWN_BYTES + 44), message_id="odd")])
    print_letter(app, letter(app), as_json=False, values=True)
    out = capsys.readouterr().out
    assert "problem:" in out
    assert r"b'\xff" in out
    assert "and 44 more bytes (--json shows all)" in out
