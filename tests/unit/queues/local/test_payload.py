"""An envelope in the engine's payload, and what comes back out of it."""

import math
import tracemalloc

import msgpack
import pytest

from aztask.errors import ConfigurationError, EncodeError, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.local.payload import envelope_of, new_message, payload_of

FULL = Envelope(
    b"body",
    {"task": "a.b", "n": [1, {"x": b"y"}]},
    message_id="m",
    content_type="application/json",
    subject="s",
    correlation_id="c",
    session="tenant",
    partition_key="p",
    expires_at=5.0,
    properties={"priority": 3},
)


def test_what_was_written_is_read_again():
    assert envelope_of(payload_of(FULL)) == FULL


@pytest.mark.parametrize(
    "payload",
    [b"", b"plain text", msgpack.packb([]), msgpack.packb([2, *[None] * 11]), msgpack.packb([1])],
    ids=["empty", "text", "no-version", "newer", "too-short"],
)
def test_a_payload_of_another_program_becomes_plain_bytes(payload):
    envelope = envelope_of(payload)
    assert envelope.body == payload
    assert envelope.content_type == "application/octet-stream"


def test_headers_that_cannot_be_written_are_refused():
    with pytest.raises(EncodeError, match="headers of message 'm'"):
        payload_of(Envelope(b"", {"h": object()}, message_id="m"))


def test_the_limit_holds_to_the_byte():
    size = len(payload_of(FULL))
    assert len(payload_of(FULL, size)) == size
    with pytest.raises(MessageTooLarge, match=f"has {size} bytes"):
        payload_of(FULL, size - 1)


def test_a_delay_becomes_a_due_time():
    assert new_message(FULL, 5.0, 100.0).due == 105.0
    at_once = new_message(FULL, 0.0, 100.0)
    assert (at_once.due, at_once.message_id, at_once.session) == (None, "m", "tenant")


@pytest.mark.parametrize("delay", [-1.0, math.inf, math.nan])
def test_a_delay_that_is_no_number_of_seconds_is_refused(delay):
    with pytest.raises(ConfigurationError, match="a delay is a number of seconds"):
        new_message(FULL, delay, 100.0)


FIELDS = [
    "body", "headers", "message_id", "content_type", "content_encoding", "subject",
    "correlation_id", "session", "partition_key", "expires_at", "properties",
]  # fmt: skip
WRONG = [True, 5, 1.5, "text", b"bytes", [1], {"a": 1}, None, msgpack.ExtType(5, b"x")]
ALLOWED = {
    "body": [b"bytes"],
    "headers": [{"a": 1}],
    "properties": [{"a": 1}],
    "expires_at": [5, 1.5, None],
    **{name: ["text"] for name in FIELDS[2:5]},
    **{name: ["text", None] for name in FIELDS[5:9]},
}


@pytest.mark.parametrize("number", range(len(FIELDS)), ids=FIELDS)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_a_field_of_a_wrong_type_is_named(number, value):
    name, fields = FIELDS[number], msgpack.unpackb(payload_of(FULL))
    fields[number + 1] = value
    payload = msgpack.packb(fields)
    envelope = envelope_of(payload)
    if any(type(value) is type(each) for each in ALLOWED[name]):
        assert (getattr(envelope, name), envelope.problem) == (value, "")
    else:
        text = f"the message's payload is damaged: its {name} is {type(value).__name__}"
        assert (envelope.body, envelope.problem) == (payload, text)


def test_a_payload_has_limits_before_it_is_unpacked():
    flood = msgpack.packb([1, b"", {"h": [[]] * 2_000_000}, *[None] * 9])
    tracemalloc.start()
    try:
        envelope = envelope_of(flood)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert envelope.body == flood
    assert envelope.content_type == "application/octet-stream"
    assert peak < len(flood)
