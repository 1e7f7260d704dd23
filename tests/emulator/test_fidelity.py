"""A message is received exactly as it was sent: bodies, properties, annotations, AMQP types."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus._pyamqp.types import AMQPTypes
from azure.servicebus.amqp import (
    AmqpAnnotatedMessage,
    AmqpMessageBodyType,
    AmqpMessageHeader,
    AmqpMessageProperties,
)

WAIT = 5
IDENTIFIER = uuid4()
TYPED = {
    "null": (None, None),
    "boolean": (True, AMQPTypes.boolean),
    "ubyte": (200, AMQPTypes.ubyte),
    "ushort": (60_000, AMQPTypes.ushort),
    "uint": (4_000_000_000, AMQPTypes.uint),
    "ulong": (2**64 - 1, AMQPTypes.ulong),
    "byte": (-100, AMQPTypes.byte),
    "short": (-30_000, AMQPTypes.short),
    "int": (-2_000_000_000, AMQPTypes.int),
    "long": (-(2**63), AMQPTypes.long),
    "float": (0.5, AMQPTypes.float),
    "double": (1.1, AMQPTypes.double),
    "timestamp": (1_700_000_000_123, AMQPTypes.timestamp),
    "uuid": (IDENTIFIER, AMQPTypes.uuid),
    "binary": (b"\x00\xff", AMQPTypes.binary),
    "string": ("snow \u2603", AMQPTypes.string),
    "symbol": (b"symbol", AMQPTypes.symbol),
}


def typed(value, kind):
    return value if kind is None else {"TYPE": kind, "VALUE": value}


def received(value):
    return value.encode() if isinstance(value, str) else value


def test_application_properties_of_every_type(queue, link):
    sender, receiver = link(queue())
    properties = {name: typed(*pair) for name, pair in TYPED.items()}
    message = ServiceBusMessage("x")
    message.application_properties = properties
    sender.send_messages(message)
    (got,) = receiver.receive_messages(1, max_wait_time=WAIT)
    expected = {name.encode(): received(value) for name, (value, _) in TYPED.items()}
    assert got.application_properties == expected
    receiver.complete_message(got)


def test_properties_header_and_annotations(queue, link):
    sender, receiver = link(queue())
    created = int(datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC).timestamp() * 1000)
    message = AmqpAnnotatedMessage(
        data_body=[b"one", b"two", b""],
        header=AmqpMessageHeader(durable=True, priority=7),
        properties=AmqpMessageProperties(
            message_id="m",
            user_id=b"user",
            to="to",
            subject="subject",
            reply_to="reply",
            correlation_id="c",
            content_type="text/plain",
            content_encoding="utf-8",
            creation_time=created,
            group_id="group",
            group_sequence=5,
            reply_to_group_id="answers",
        ),
        annotations={"x-mine": 5, "x-opt-partition-key": "key"},
        footer={"f": "oot"},
    )
    sender.send_messages(message)
    (got,) = receiver.receive_messages(1, max_wait_time=WAIT)
    raw = got.raw_amqp_message
    assert list(raw.body) == [b"one", b"two", b""]
    assert (raw.header.durable, raw.header.priority) == (True, 7)
    sent = message.properties
    for name in ("subject", "to", "reply_to", "content_type", "content_encoding", "group_id"):
        assert getattr(raw.properties, name) == getattr(sent, name).encode()
    assert raw.properties.user_id == b"user"
    assert raw.properties.creation_time == created
    assert raw.properties.group_sequence == 5
    assert raw.annotations[b"x-mine"] == 5
    assert got.partition_key == "key"
    assert raw.footer == {b"f": b"oot"}
    receiver.complete_message(got)


def test_value_and_sequence_bodies(queue, link):
    sender, receiver = link(queue())
    nested = {"list": [1, [2, [3, None]]], "map": {"k": b"v"}}
    sender.send_messages(AmqpAnnotatedMessage(value_body=nested))
    sender.send_messages(AmqpAnnotatedMessage(sequence_body=[[1, 2], ["three"]]))
    value, sequence = receiver.receive_messages(2, max_wait_time=WAIT)
    assert value.body_type == AmqpMessageBodyType.VALUE
    assert value.body == {b"list": [1, [2, [3, None]]], b"map": {b"k": b"v"}}
    assert sequence.body_type == AmqpMessageBodyType.SEQUENCE
    assert list(sequence.body) == [[1, 2], [b"three"]]
    for message in (value, sequence):
        receiver.complete_message(message)


def test_peeked_deferred_and_scheduled_messages_are_the_same(queue, link):
    sender, receiver = link(queue())
    sent = ServiceBusMessage(b"\x00body", application_properties={"k": 1}, subject="s")
    sender.schedule_messages(sent, datetime(2020, 1, 1, tzinfo=UTC))
    (peeked,) = receiver.peek_messages(1, sequence_number=1)
    (got,) = receiver.receive_messages(1, max_wait_time=WAIT)
    receiver.defer_message(got)
    (deferred,) = receiver.receive_deferred_messages(got.sequence_number)
    for one in (peeked, got, deferred):
        assert b"".join(one.body) == b"\x00body"
        assert one.application_properties == {b"k": 1}
        assert one.subject == "s"
    receiver.complete_message(deferred)


def test_a_received_message_can_be_sent_again(queue, link):
    """The SDK writes its delivery annotations after the body, the old lock token among them."""
    sender, receiver = link(queue())
    sent = ServiceBusMessage(b"body", application_properties={"k": 1}, subject="s", message_id="m")
    sender.send_messages(sent)
    (first,) = receiver.receive_messages(1, max_wait_time=WAIT)
    sender.send_messages(first)
    sender.send_messages([first])  # in a batch
    sender.schedule_messages(first, datetime(2020, 1, 1, tzinfo=UTC))
    receiver.complete_message(first)
    copies = []
    while len(copies) < 3:
        copies += receiver.receive_messages(3 - len(copies), max_wait_time=WAIT)
    tokens = {first.lock_token}
    for copy in copies:
        assert b"".join(copy.body) == b"body"
        assert (copy.application_properties, copy.subject) == ({b"k": 1}, "s")
        assert (copy.message_id, copy.delivery_count) == ("m", 0)
        assert copy.sequence_number > first.sequence_number
        tokens.add(copy.lock_token)
        receiver.complete_message(copy)
    assert len(tokens) == 4
    assert receiver.peek_messages(1) == []


def test_messages_without_a_body(queue, link, client):
    name = queue()
    sender, receiver = link(name)
    empty = ServiceBusMessage(None)
    sender.send_messages(empty)
    sender.send_messages([ServiceBusMessage(None, subject="s"), ServiceBusMessage(None)])
    sender.schedule_messages(ServiceBusMessage(None), datetime(2020, 1, 1, tzinfo=UTC))
    peeked = receiver.peek_messages(10)
    got = []
    while len(got) < 4:
        got += receiver.receive_messages(4 - len(got), max_wait_time=WAIT)
    receiver.defer_message(got[0])
    (deferred,) = receiver.receive_deferred_messages(got[0].sequence_number)
    for message in (*peeked, *got, deferred):
        assert (message.body, message.body_type) == (None, AmqpMessageBodyType.VALUE)
        assert message.message_id
    assert [message.subject for message in got] == [None, "s", None, None]
    receiver.complete_message(deferred)
    receiver.complete_message(got[1])
    receiver.dead_letter_message(got[2], reason="bad", error_description="very")
    receiver.abandon_message(got[3])
    (again,) = receiver.receive_messages(1, max_wait_time=WAIT)
    receiver.complete_message(again)
    with client.get_queue_receiver(name, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead:
        (letter,) = dead.receive_messages(1, max_wait_time=WAIT)
        assert (letter.body, letter.dead_letter_reason) == (None, "bad")
        sender.send_messages(letter)
        dead.complete_message(letter)
    (revived,) = receiver.receive_messages(1, max_wait_time=WAIT)
    assert revived.body is None
    receiver.complete_message(revived)


def test_delivery_annotations_arrive(queue, link, client):
    name = queue()
    sender, receiver = link(name)
    for _ in range(2):
        sender.send_messages(
            AmqpAnnotatedMessage(data_body=b"x", delivery_annotations={"mine": "yours"})
        )
    (got,) = receiver.receive_messages(1, max_wait_time=WAIT)
    assert got.raw_amqp_message.delivery_annotations == {
        b"mine": b"yours",
        b"x-opt-lock-token": got.lock_token,
    }
    receiver.complete_message(got)
    with client.get_queue_receiver(name, receive_mode="receiveanddelete") as deleting:
        (got,) = deleting.receive_messages(1, max_wait_time=WAIT)
        assert got.raw_amqp_message.delivery_annotations == {b"mine": b"yours"}


def test_annotations_are_those_that_the_service_sets(queue, link, client):
    name = queue()
    sender, receiver = link(name)
    sender.send_messages([ServiceBusMessage("x"), ServiceBusMessage("y")])
    (peeked,) = receiver.peek_messages(1)
    (got,) = receiver.receive_messages(1, max_wait_time=WAIT)
    usual = {b"x-opt-sequence-number", b"x-opt-enqueued-time"}
    assert got.raw_amqp_message.annotations.keys() == {*usual, b"x-opt-locked-until"}
    assert got.state == peeked.state == 0
    assert b"x-opt-message-state" in peeked.raw_amqp_message.annotations
    receiver.complete_message(got)
    with client.get_queue_receiver(name, receive_mode="receiveanddelete") as deleting:
        (got,) = deleting.receive_messages(1, max_wait_time=WAIT)
        assert got.raw_amqp_message.annotations.keys() == usual
        assert got.raw_amqp_message.delivery_annotations == {}
        assert (got.lock_token, got._delivery_tag) == (None, b"")
