"""Incoming messages."""

from __future__ import annotations

import pytest
from emulatorbench import body_of, message

from aztask.emulator.amqp import AmqpError, encode, sections
from aztask.emulator.amqp.sections import cut
from aztask.emulator.broker import stored
from aztask.emulator.broker.entities import EntityKind, Status
from aztask.emulator.broker.forwarding import sendable
from aztask.emulator.broker.producer import BATCH_FORMAT, messages_of, new_message


@pytest.mark.parametrize(
    ("settings", "path", "condition"),
    [
        ({}, "missing", "amqp:not-found"),
        ({"status": Status.SEND_DISABLED}, "q", "com.microsoft:entity-disabled"),
        ({"kind": EntityKind.TOPIC}, "q/Subscriptions/s", "amqp:not-allowed"),
    ],
)
def test_entities_that_accept_no_messages(bench, settings, path, condition):
    bench.create("q", **settings)
    if settings.get("kind"):
        bench.create("q/Subscriptions/s", kind=EntityKind.SUBSCRIPTION)
    with pytest.raises(AmqpError) as caught:
        sendable(bench.namespace, path)
    assert caught.value.condition == condition


def test_a_batch_is_many_messages(bench):
    entity = bench.create("q")
    parts = [message(b"one", message_id="1"), message(b"two", message_id="2")]
    batch = b"".join(encode.described(sections.DATA, encode.binary(each)) for each in parts)
    raws = messages_of(batch, BATCH_FORMAT)
    made = [new_message(entity, raw, bench.now) for raw in raws]
    assert [each.message_id for each in made] == ["1", "2"]
    assert [body_of(stored.unpack(each.payload).bare) for each in made] == [b"one", b"two"]
    assert messages_of(batch, 0) == [batch]
    with pytest.raises(AmqpError, match="batch of 0"):
        messages_of(b"", BATCH_FORMAT)


def test_a_message_without_an_id_gets_one(bench):
    made = new_message(bench.create("q"), message(), bench.now)
    assert cut(stored.unpack(made.payload).bare).property(sections.MESSAGE_ID) == made.message_id


@pytest.mark.parametrize(
    ("message_id", "text"),
    [(encode.uint(5), "5"), (encode.binary(b"\x01"), "01"), (encode.string("s"), "s")],
)
def test_message_ids_of_every_type(bench, message_id, text):
    raw = encode.fields(sections.PROPERTIES, [message_id])
    assert new_message(bench.create("q"), raw, bench.now).message_id == text


def test_schedule_and_expiry(bench):
    entity = bench.create("q")
    due = int((bench.now + 60) * 1000)
    header = encode.fields(sections.HEADER, [encode.NULL, encode.NULL, encode.uint(5000)])
    for moment, expected in ((due, bench.now + 60), (5, None)):
        pair = (encode.symbol(stored.SCHEDULED_TIME), encode.timestamp(moment))
        raw = header + encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of([pair]))
        made = new_message(entity, raw + message(), bench.now)
        assert made.due == expected
        assert made.expires_at == (expected or bench.now) + 5


def test_sessions_are_required_where_they_are_needed(bench):
    entity = bench.create("s", sessions=True)
    with pytest.raises(AmqpError, match="requires sessions"):
        new_message(entity, message(), bench.now)
    made = new_message(entity, message(session="one"), bench.now)
    assert made.session == "one"


@pytest.mark.parametrize("raw", [message(session="x" * 129), message(message_id="x" * 129)])
def test_long_ids_are_refused(bench, raw):
    with pytest.raises(AmqpError, match="invalid-field"):
        new_message(bench.create("q"), raw, bench.now)


def test_properties_are_limited_and_bodies_are_not(bench):
    entity = bench.create("q")
    new_message(entity, message(bytes(100_000)), bench.now)
    new_message(entity, message(text="x" * 60_000), bench.now)
    with pytest.raises(AmqpError, match="of properties; a message has at most 65536"):
        new_message(entity, message(text="x" * 66_000), bench.now)


def test_the_time_to_live_is_that_of_the_queue_unless_the_message_has_less(bench):
    entity = bench.create("q", time_to_live=10.0)
    for own, expected in ((None, 10_000), (5_000, 5_000), (60_000, 10_000)):
        fields = [encode.NULL, encode.NULL, encode.NULL if own is None else encode.uint(own)]
        made = new_message(entity, encode.fields(sections.HEADER, fields) + message(), bench.now)
        assert stored.unpack(made.payload).ttl == expected
