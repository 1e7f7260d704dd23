"""The temporary queues of one connection, and which of them become mailboxes."""

import json
import logging
import threading

import pytest

from aztask import App
from aztask.celery.transport.boxes import Boxes, Pump, commands_for, revoked_by
from aztask.errors import BrokerUnavailable, CapabilityError, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import EXCHANGE, ROUTING_KEY, Binding, Capabilities


@pytest.fixture
def broker():
    app = App("shop", broker="local://:memory:")
    yield app.broker
    app.close()


@pytest.fixture
def boxes(broker):
    boxes = Boxes(broker, enabled=True)
    yield boxes
    boxes.close()


def test_a_temporary_queue_becomes_a_mailbox_when_it_is_bound(boxes, broker):
    assert boxes.declare("a")
    assert not boxes.has("a")
    assert boxes.bind("a", Binding("control"))
    assert boxes.has("a")
    assert boxes.usable("a")
    assert boxes.take_undecided() == []
    boxes.declare("b")
    assert boxes.take_undecided("c") == []
    assert boxes.take_undecided() == ["b"]
    assert boxes.take_undecided() == [], "each is created once"
    assert not boxes.bind("b", Binding("control")), "an ordinary queue by now"


def test_a_message_tells_where_it_was_published(boxes):
    boxes.declare("a")
    boxes.bind("a", Binding("control"))
    assert boxes.publish("control", "key", Envelope(b"x", headers={"h": 1}))
    (delivery,) = boxes.receiver("a", delete=True).receive(1, 1.0)
    assert delivery.envelope.headers == {"h": 1, EXCHANGE: "control", ROUTING_KEY: "key"}
    assert boxes.wanted("a", delivery.envelope)
    stray = {EXCHANGE: "other", ROUTING_KEY: "key"}
    assert not boxes.wanted("a", Envelope(b"x", headers=stray))


def test_commands_are_known_by_their_queue(boxes):
    for queue, kind in (
        ("w@host.celery.pidbox", "fanout"),
        ("id.reply.celery.pidbox", "direct"),
        ("broadcast", "fanout"),
    ):
        boxes.declare(queue)
        boxes.bind(queue, Binding("exchange", "", kind))
    assert boxes.is_control("w@host.celery.pidbox")
    assert not boxes.is_control("id.reply.celery.pidbox")
    assert not boxes.is_control("broadcast")
    assert not boxes.is_control("missing.pidbox")


def test_nothing_is_a_mailbox_where_remote_control_is_off(broker):
    boxes = Boxes(broker, enabled=False)
    assert not boxes.declare("a")
    assert not boxes.publish("control", "", Envelope(b"x"))


class NoMailboxes:
    """A broker of another program."""

    capabilities = Capabilities(name="other")


def test_a_client_gets_the_error_and_a_worker_goes_on(caplog):
    boxes = Boxes(NoMailboxes(), enabled=True)
    boxes.declare("replies")
    with pytest.raises(CapabilityError, match="the broker other has no remote control"):
        boxes.bind("replies", Binding("replies", "me", "direct"))
    assert not boxes.has("replies")


class Refusing:
    """Mailboxes that may not be created."""

    lifetime = 0.03
    lag = 0.0
    opened = 0
    error: Exception = ConfigurationError("needs the permission to manage")

    def open(self, name, bindings):
        self.opened += 1
        if self.error:
            raise self.error

    def delete(self, name):
        raise BrokerUnavailable("away")


def over(mailboxes):
    boxes = Boxes(NoMailboxes(), enabled=True)
    boxes._mailboxes = mailboxes
    boxes.declare("a")
    return boxes


def test_a_worker_that_may_not_be_controlled_says_so_once(caplog):
    boxes = over(Refusing())
    assert boxes.bind("a", Binding("control"))
    assert boxes.has("a")
    assert not boxes.usable("a")
    assert "remote control of this process does not work: needs the permission" in caplog.text
    boxes.close()


def test_a_thread_keeps_the_mailboxes_whatever_the_broker_answers(caplog):
    caplog.set_level(logging.INFO)
    mailboxes = Refusing()
    mailboxes.error = None
    boxes = over(mailboxes)
    boxes.bind("a", Binding("control"))
    for error in (None, BrokerUnavailable("away"), ValueError("an SDK's own")):
        before, mailboxes.error = mailboxes.opened, error
        ends = threading.Event()
        while mailboxes.opened < before + 2:
            assert not ends.wait(0.01)
    boxes.close()
    assert "mailbox a is not kept" in caplog.text
    assert "mailbox a was not removed, it will expire: away" in caplog.text


def test_a_pump_goes_on_after_errors_and_ends_when_it_is_stopped(monkeypatch, caplog):
    monkeypatch.setattr("aztask.celery.transport.boxes.PAUSE_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    errors = [BrokerUnavailable("away"), ValueError("an SDK's own")]
    enough = threading.Event()
    calls = []

    def fetch(wait):
        calls.append(wait)
        if errors:
            raise errors.pop()
        enough.set()
        enough.wait(0.01)

    pump = Pump(fetch, "box")
    pump.start()
    assert enough.wait(10)
    pump.stop()
    count = len(calls)
    assert not pump._thread.is_alive()
    assert len(calls) == count
    assert "mailbox box: away; trying again" in caplog.text


# -- What was revoked ------------------------------------------------------------------------------


def command(method, destination=None, pattern=None, **arguments):
    """A command as `kombu.pidbox` sends it."""
    body = {
        "method": method,
        "arguments": arguments,
        "destination": destination,
        "pattern": pattern,
        "matcher": None,
    }
    text = json.dumps(body)
    return {"body": text, "content-type": "application/json", "content-encoding": "utf-8"}


def told(*messages):
    """What a worker is told that starts after these commands."""
    return commands_for([note for message in messages for note in revoked_by(message)])


def test_what_was_revoked_is_told_in_one_command_that_ends_no_task():
    (hello,) = told(
        command("revoke", task_id="one", terminate=True, signal="KILL"),
        command("revoke", task_id=["two", "three"], terminate=False),
        command("terminate", task_id="four", signal="TERM"),
    )
    assert hello["method"] == "hello"
    assert hello["arguments"]["revoked"] == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    "headers", [{"site": ["a", "b"], "team": "x"}, ["site=a", "site=b", "team=x"]]
)
def test_stamps_are_told_together(headers):
    (stamped,) = told(command("revoke_by_stamped_headers", headers=headers, terminate=True))
    assert stamped == {
        "method": "revoke_by_stamped_headers",
        "arguments": {"headers": {"site": ["a", "b"], "team": ["x"]}},
    }


@pytest.mark.parametrize(
    "message",
    [
        command("revoke", destination=["w@host"], task_id="one"),
        command("revoke", pattern="w@*", task_id="one"),
        command("rate_limit", task_name="one", rate_limit="1/s"),
        command("revoke"),
        command("revoke", task_id=None),
        command("revoke", task_id="x" * 300),
        command("revoke_by_stamped_headers", headers=["site"]),
        command("revoke_by_stamped_headers", headers=5),
        {"body": "[]", "content-type": "application/json", "content-encoding": "utf-8"},
        {"body": "{", "content-type": "application/json", "content-encoding": "utf-8"},
        {"body": b"\xff", "content-type": "x/unknown", "content-encoding": "binary"},
    ],
)
def test_nothing_else_is_kept(message):
    assert revoked_by(message) == []


def test_damaged_notes_are_skipped():
    (hello,) = commands_for(["", "5", "[]", "[1]", '["a", "b", "c"]', '{"a": 1}', '["good"]'])
    assert hello["arguments"]["revoked"] == ["good"]
    assert commands_for([]) == []


def test_a_sender_that_may_not_keep_it_goes_on_and_one_that_cannot_reach_the_broker_fails(caplog):
    class Notes(Refusing):
        def keep(self, exchange, notes):
            raise self.error

        kept = keep

    boxes = over(Notes())
    boxes._broker = App("shop", broker="local://:memory:").broker
    boxes.keep_revoked("celery.pidbox", command("revoke", task_id="one"))
    assert "only workers that run now are told what is revoked: needs" in caplog.text
    Notes.error = BrokerUnavailable("away")
    with pytest.raises(BrokerUnavailable):
        boxes.keep_revoked("celery.pidbox", command("revoke", task_id="one"))
