"""Batches whose messages are encoded once hold the same bytes as those of the SDK."""

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus._pyamqp import _encode
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.exceptions import MessageSizeExceededError

from aztask.brokers.servicebus import encoding
from aztask.brokers.servicebus.encoding import OnceEncoding, encode_once

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
    encoded = []

    def counted(output, payload):
        encoded.append(payload)
        return _encode.encode_payload(output, payload)

    monkeypatch.setattr(encoding, "encode_payload", counted)
    filled(encode_once(ServiceBusMessageBatch()))
    assert len(encoded) == len(MESSAGES)


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


def test_an_sdk_that_asks_otherwise_encodes_twice(monkeypatch):
    encoding._supported.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(PyamqpTransport, "add_batch", staticmethod(lambda batch: None))
            batch = encode_once(ServiceBusMessageBatch())
        assert batch._amqp_transport is PyamqpTransport
    finally:
        encoding._supported.cache_clear()
