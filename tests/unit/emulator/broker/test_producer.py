"""Links on which clients send."""

from __future__ import annotations

import pytest
from emulatorbench import message

from aztask.emulator.broker.entities import EntityKind
from aztask.errors import QueueFull


def outcome(answers):
    (disposition,) = answers
    error = disposition.state.value
    return disposition.state.descriptor, error[0].value[0] if error else None


@pytest.fixture
def client(bench):
    bench.create("q", max_message_bytes=2000)
    made = bench.client()
    made.attach(receive=False)
    return made


def test_a_message_is_stored_before_it_is_accepted(bench, client):
    client.transfer(0, message())
    assert bench.engine.stats("q").active == 0
    assert client.connection.output() == b""
    assert outcome([e for e in client.frames() if type(e).__name__ == "Disposition"]) == (
        0x24,
        None,
    )
    assert bench.engine.stats("q").active == 1


def test_a_settled_message_needs_no_answer(bench, client):
    assert client.send(0, message(), settled=True) == []
    assert bench.engine.stats("q").active == 1


@pytest.mark.parametrize(
    ("payload", "condition"),
    [
        (b"garbage", "amqp:decode-error"),
        (message(bytes(2000)), "amqp:link:message-size-exceeded"),
    ],
)
def test_refused_messages_are_rejected_and_the_link_stays(bench, client, payload, condition):
    assert outcome(client.send(0, payload)) == (0x25, condition)
    assert outcome(client.send(1, message())) == (0x24, None)
    assert bench.engine.stats("q").active == 1


def test_an_error_of_the_store_is_reported(bench, client, monkeypatch):
    def full(*_args):
        raise QueueFull("the disk is full")

    monkeypatch.setattr(bench.engine, "send", full)
    assert outcome(client.send(0, message())) == (0x25, "amqp:resource-limit-exceeded")


def test_topics_accept_messages(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    client = bench.client()
    client.attach(receive=False, address="t")
    assert outcome(client.send(0, message())) == (0x24, None)
    assert bench.engine.stats("t/Subscriptions/s").active == 1
