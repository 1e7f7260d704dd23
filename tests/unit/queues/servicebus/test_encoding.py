"""Batches whose messages are encoded once hold the same bytes as those of the SDK."""

from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import Header, Message, Properties
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.exceptions import MessageSizeExceededError
from hypothesis import given
from hypothesis import strategies as st

from aztask.queues.servicebus import senders
from aztask.queues.servicebus.senders import OnceEncoding, encode_once, encoded

MESSAGES = (
    {"body": b"", "message_id": "a"},
    {
        "body": b"x" * 300,
        "message_id": "b",
        "subject": "shop.add",
        "application_properties": {"n": 1, "t": "ü"},
    },
    {
        "body": b"y" * 70_000,
        "message_id": "c",
        "session_id": "s",
        "partition_key": "s",
        "content_type": "text/plain",
    },
)


def filled(batch, count=len(MESSAGES)):
    for fields in MESSAGES[:count]:
        batch.add_message(ServiceBusMessage(**fields))
    return batch


def test_the_bytes_and_the_size_are_those_of_the_sdk():
    ours, sdks = filled(encode_once(ServiceBusMessageBatch())), filled(ServiceBusMessageBatch())
    assert isinstance(ours._amqp_transport, OnceEncoding)
    assert [bytes(each) for each in ours._message[5]] == [bytes(each) for each in sdks._message[5]]
    assert ours._message[3] == sdks._message[3], "the envelope's own properties"
    assert (ours.size_in_bytes, len(ours)) == (sdks.size_in_bytes, len(sdks))


def test_each_message_is_encoded_once(monkeypatch):
    asked = []

    def counted(message):
        asked.append(message)
        return encoded(message)

    monkeypatch.setattr(senders, "encoded", counted)
    filled(encode_once(ServiceBusMessageBatch()))
    assert len(asked) == len(MESSAGES)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
VALUES = st.one_of(
    TEXTS,
    st.booleans(),
    st.floats(),
    st.none(),
    st.integers(-(2**31), 2**31 - 1),
    TEXTS.map(str.encode),
    st.datetimes(),
    st.uuids(),
)


@given(
    body=st.binary(max_size=300) | TEXTS,
    properties=st.none() | st.dictionaries(TEXTS | TEXTS.map(str.encode), VALUES, max_size=20),
    fields=st.fixed_dictionaries(
        {},
        optional={
            name: TEXTS.filter(lambda text: len(text) <= 128)
            for name in (
                "message_id",
                "session_id",
                "content_type",
                "correlation_id",
                "subject",
                "to",
                "reply_to",
                "reply_to_session_id",
                "partition_key",
            )
        }
        | {
            "time_to_live": st.timedeltas(timedelta(seconds=1), timedelta(days=49)),
            "scheduled_enqueue_time_utc": st.datetimes(datetime(2000, 1, 1)),
        },
    ),
)
def test_any_message_has_the_bytes_of_the_sdk(body, properties, fields):
    if "session_id" in fields:
        fields.pop("partition_key", None)
    message = ServiceBusMessage(body, application_properties=properties, **fields)
    outgoing = PyamqpTransport.to_outgoing_amqp_message(message.raw_amqp_message)
    assert encoded(outgoing) == encode_payload(bytearray(), outgoing)


@pytest.mark.parametrize(
    "section",
    [
        {"value": "text"},
        {"sequence": [[1, 2]]},
        {"footer": {"a": 1}, "data": [b"x"]},
        {"delivery_annotations": {"a": 1}, "data": [b"x"]},
        {"properties": Properties(message_id=7, user_id=b"u", group_sequence=3), "data": [b"x"]},
        {"properties": Properties(message_id=uuid4()), "data": []},
        {"header": Header(durable=True, priority=4), "data": [b"x" * 256, b""]},
        {"application_properties": {1: "a"}, "data": [b""]},
        {"application_properties": {f"n{number}": number for number in range(200)}, "data": [b""]},
    ],
)
def test_other_sections_are_left_to_the_sdk(section):
    assert encoded(Message(**section)) == encode_payload(bytearray(), Message(**section))


@pytest.mark.parametrize(
    "properties", [{"a": 2**31}, {"a": object()}, {"a": "\ud800"}, {"\ud800": "a"}]
)
def test_a_value_that_the_sdk_refuses_is_refused_alike(properties):
    message = Message(application_properties=properties, data=[b""])
    with pytest.raises(Exception) as sdks:  # whatever the SDK raises
        encode_payload(bytearray(), message)
    with pytest.raises(sdks.type):
        encoded(message)


def test_a_message_that_does_not_fit_is_refused_and_not_in_the_batch():
    batch = filled(encode_once(ServiceBusMessageBatch(max_size_in_bytes=1_000)), 2)
    with pytest.raises(MessageSizeExceededError):
        batch.add_message(ServiceBusMessage(**MESSAGES[2]))
    batch.add_message(ServiceBusMessage(**MESSAGES[0]))
    first, second = filled(ServiceBusMessageBatch(), 2)._message[5]
    assert batch._message[5] == [first, second, first]


def test_a_message_whose_size_nobody_asked_for_is_encoded():
    batch = ServiceBusMessageBatch()
    message = ServiceBusMessage(b"x")
    message._message = PyamqpTransport.to_outgoing_amqp_message(message.raw_amqp_message)
    OnceEncoding().add_batch(batch, message)
    assert PyamqpTransport.get_message_encoded_size(message._message) == len(batch._message[5][0])


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (PyamqpTransport, "add_batch", staticmethod(lambda batch: None)),
        (senders, "_FIELDS", senders._FIELDS[:-1]),
    ],
)
def test_an_sdk_of_another_shape_keeps_its_transport(monkeypatch, owner, name, value):
    senders._supported.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            batch = encode_once(ServiceBusMessageBatch())
        assert batch._amqp_transport is PyamqpTransport
    finally:
        senders._supported.cache_clear()
