"""Envelopes as Service Bus messages: what is native, what is packed, what is refused."""

import base64
import math
import tracemalloc
import uuid
from decimal import Decimal

import msgpack
import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport

from aztask.celery.transport.routing import to_message
from aztask.errors import (
    ConfigurationError,
    DecodeError,
    EncodeError,
    MessageTooLarge,
)
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.queues.servicebus.reading import damaged, read_message
from aztask.queues.servicebus.wire import (
    EXPIRES_AT,
    LONGEST_LIFE,
    PACKED,
    envelope_of,
    message_of,
)

NOW = 1_800_000_000.0


def test_simple_headers_are_application_properties():
    headers = {"task": "a.b", "retries": 3, "yes": True, "share": 0.5}
    message = message_of(Envelope(b"x", headers), NOW)
    assert message.application_properties == headers


@pytest.mark.parametrize(
    "value", [None, [1, None], {"a": b"b"}, b"bytes", 2**31, -(2**63)], ids=repr
)
def test_everything_else_is_packed(value):
    properties = message_of(Envelope(b"x", {"h": value, "s": "t"}), NOW).application_properties
    assert "h" not in properties
    assert properties["s"] == "t"
    assert isinstance(properties[PACKED], str)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(EncodeError, match="headers"):
        message_of(Envelope(b"x", {"h": object()}), NOW)


def test_a_delay_is_absolute_by_the_services_clock():
    message = message_of(Envelope(b"x", delay=90.0), NOW)
    assert message.scheduled_enqueue_time_utc.timestamp() == NOW + 90.0
    assert message_of(Envelope(b"x"), NOW).scheduled_enqueue_time_utc is None


@pytest.mark.parametrize("delay", [-1.0, math.inf, math.nan, 1e12])
def test_a_delay_that_cannot_be_is_refused(delay):
    with pytest.raises(ConfigurationError, match="delay"):
        message_of(Envelope(b"x", delay=delay), NOW)


def test_the_time_to_live_counts_from_the_schedule():
    message = message_of(Envelope(b"x", delay=60.0, expires_at=NOW + 100.0), NOW)
    assert message.time_to_live.total_seconds() == pytest.approx(40.0)
    assert message.application_properties[EXPIRES_AT] == NOW + 100.0


def test_what_expires_before_its_schedule_lives_as_short_as_can_be():
    message = message_of(Envelope(b"x", delay=60.0, expires_at=NOW + 1.0), NOW)
    assert message.time_to_live.total_seconds() == 1.0


def test_an_expiry_that_amqp_cannot_say_is_left_to_the_worker():
    message = message_of(Envelope(b"x", expires_at=NOW + LONGEST_LIFE + 1.0), NOW)
    assert message.time_to_live is None


def test_too_many_bytes_are_refused_before_anything_is_sent():
    with pytest.raises(MessageTooLarge, match="accepts 1000"):
        message_of(Envelope(b"x" * 900, {"h": "y" * 100}), NOW, 1000)


def test_a_message_just_below_the_limit_is_taken():
    envelope = Envelope(b"x" * 500, {"h": "y" * 100})
    assert message_of(envelope, NOW, 1000).application_properties == {"h": "y" * 100}


def test_an_id_longer_than_the_services_is_refused():
    with pytest.raises(EncodeError, match="128"):
        message_of(Envelope(b"x", message_id="i" * 129), NOW)


def received(**sections: object) -> ServiceBusReceivedMessage:
    """A message as the SDK hands it out."""
    return ServiceBusReceivedMessage(Message(**sections), receiver=None)


def test_foreign_values_become_what_a_header_can_hold():
    """And what it holds a clone can carry: it is written and read again, unchanged."""
    properties = {
        b"price": Decimal("12.50"),
        b"guid": uuid.UUID(int=7),
        b"grade": "\N{GREEK SMALL LETTER ALPHA}",
        b"list": [Decimal(1), b"text", {b"key": uuid.UUID(int=8)}],
        b"raw": b"\xff\xfe",
        b"big": 2**63 - 1,
    }
    envelope = envelope_of(received(application_properties=properties, data=[b"x"]))
    assert envelope.headers == {
        "price": "12.50",
        "guid": str(uuid.UUID(int=7)),
        "grade": "\N{GREEK SMALL LETTER ALPHA}",
        "list": ["1", "text", {"key": str(uuid.UUID(int=8))}],
        "raw": b"\xff\xfe",
        "big": 2**63 - 1,
    }
    raw = encode_payload(
        bytearray(),
        PyamqpTransport.to_outgoing_amqp_message(message_of(envelope, NOW).raw_amqp_message),
    )
    again = ServiceBusReceivedMessage(read_message(raw), receiver=None)
    assert envelope_of(again).headers == envelope.headers


@pytest.mark.parametrize(
    ("sections", "body"),
    [
        ({"data": [b"ab", b"c"]}, b"abc"),
        ({"value": b"text"}, b"text"),
        ({"value": Decimal("1.5")}, b"1.5"),
        ({"value": None}, b""),
        ({}, b""),
        ({"sequence": [[1, 2]]}, None),
    ],
)
def test_bodies_of_foreign_producers(sections, body):
    envelope = envelope_of(received(**sections))
    assert envelope.problem == ""
    assert body is None or envelope.body == body


def test_what_cannot_be_read_is_an_envelope_of_its_bytes():
    properties = Properties(message_id=b"m", group_id=b"s")
    whole = damaged(b"all of it", "the data cannot be read", properties=properties)
    envelope = envelope_of(ServiceBusReceivedMessage(whole, receiver=None))
    assert (envelope.body, envelope.problem) == (b"all of it", "the data cannot be read")
    assert (envelope.message_id, envelope.session) == ("m", "s")
    with pytest.raises(DecodeError, match="the data cannot be read"):
        Codec().from_envelope(envelope, "q")
    with pytest.raises(DecodeError, match="the data cannot be read"):
        to_message(envelope, MessageLimits())


def test_whatever_is_in_a_message_only_that_message_is_refused():
    message = received(application_properties={b"h": 1}, data=[b"x"])
    message.raw_amqp_message._application_properties = 5
    assert (
        "TypeError" in envelope_of(message).problem or "Attribute" in envelope_of(message).problem
    )


PACKED_FLOODS = {
    "many": msgpack.packb({"headers": {}, "properties": {"p": [[]] * 2_000_000}}),
    "long": msgpack.packb({"headers": {"h": bytes(20 << 20)}, "properties": {}}),
}


@pytest.mark.parametrize("content", PACKED_FLOODS.values(), ids=PACKED_FLOODS)
def test_packed_headers_have_limits_before_they_are_unpacked(content):
    packed = base64.b64encode(content)
    message = received(application_properties={PACKED.encode(): packed}, data=[b"x"])
    tracemalloc.start()
    try:
        envelope = envelope_of(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "ContentRefused" in envelope.problem
    assert peak < 3 * len(packed)
