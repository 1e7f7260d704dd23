"""References to payloads, and messages whose arguments are stored apart."""

from dataclasses import replace

import pytest

from aztask.errors import ContentRefused, DecodeError, EncodeError, PayloadDamaged
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.payload import PAYLOAD_BYTES, StoredValue, stored_in

NAME = "args/2026112314/" + "0" * 32
STORED = StoredValue.of(NAME, b"data")
MESSAGE = TaskMessage(id="a", task="t", queue="q", body=b"", payload=str(STORED))


def test_a_reference_is_read_as_it_is_written():
    assert StoredValue.parse(str(STORED)) == STORED
    assert STORED.described == f"4 bytes in {NAME}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"4:{STORED.digest}",
        f"0:{STORED.digest}:{NAME}",
        f"{PAYLOAD_BYTES + 1}:{STORED.digest}:{NAME}",
        f"4:{STORED.digest.upper()}:{NAME}",
        f"4:{STORED.digest}:../../../etc/passwd",
        f"4:{STORED.digest}:args/2026112314/../../{'0' * 26}",
        f"4:{STORED.digest}:{NAME}\n",
        f"4:{STORED.digest}:/{NAME}",
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(DecodeError, match="reference to a payload"):
        StoredValue.parse(text)


def test_other_bytes_are_refused():
    STORED.verify(b"data")
    for data, words in [(b"dat", "has 3 bytes"), (b"data!", "more than 4"), (b"Data", "changed")]:
        with pytest.raises(PayloadDamaged, match=words):
            STORED.verify(data)


def test_the_message_travels_with_its_reference():
    codec = Codec()
    envelope = codec.to_envelope(MESSAGE)
    assert envelope.body == b""
    assert envelope.headers["aztask-payload"] == str(STORED)
    assert envelope.content_type == "application/x-aztask-payload+msgpack"
    assert codec.from_envelope(envelope, "q") == MESSAGE


def test_clones_and_replays_keep_it_and_pointers_do_not():
    assert MESSAGE.resubmitted(counted=True).payload == MESSAGE.payload
    assert MESSAGE.replayed().payload == MESSAGE.payload
    assert MESSAGE.pointing(1, counted=True, delivery_base=0).payload is None


@pytest.mark.parametrize(
    "changes",
    [
        {"content_type": "application/x-msgpack"},
        {"body": b"\x93\x90\x80\xc0"},
        {"headers": {"task": "t", "id": "a"}},
    ],
)
def test_a_part_of_a_reference_is_refused(changes):
    """A body beside a reference, or one without the other, would run with other arguments."""
    codec = Codec()
    envelope = replace(codec.to_envelope(MESSAGE), **changes)
    with pytest.raises(DecodeError, match="one of them is wrong"):
        codec.from_envelope(envelope, "q")


def test_the_signature_covers_the_reference():
    codec = Codec(signing_keys=[b"k" * 32])
    envelope = codec.to_envelope(MESSAGE)
    assert codec.from_envelope(envelope, "q") == MESSAGE
    other = str(StoredValue.of(NAME, b"evil"))
    headers = {**envelope.headers, "aztask-payload": other}
    with pytest.raises(ContentRefused, match="signature"):
        codec.from_envelope(replace(envelope, headers=headers), "q")


def test_a_listing_says_where_the_arguments_are():
    with pytest.raises(ContentRefused, match=f"stored apart, 4 bytes in {NAME}"):
        Codec().decode_arguments(MESSAGE)


def test_a_reference_is_a_value_of_msgpack():
    codec = Codec()
    data = codec.encode_value([STORED, 1])
    assert codec.decode_body(data, "application/x-msgpack") == [STORED, 1]
    with pytest.raises(EncodeError, match=r"use serializer=.msgpack."):
        Codec(serializer="json").encode_arguments((STORED,), {})


def test_a_stored_value_is_fetched_when_it_is_decoded():
    inner = Codec().encode_value({"rows": 3})
    codec = Codec(load=lambda stored: inner)
    data = codec.encode_value(StoredValue.of(NAME, inner))
    assert codec.decode_value(data) == {"rows": 3}
    assert codec.decode_value(b"\x92" + 2 * data) == [{"rows": 3}] * 2
    with pytest.raises(ContentRefused, match="no store for it"):
        Codec().decode_value(data)


@pytest.mark.parametrize("data", [b"\xc7\x03\x08abc", b"\xc7\x0f\x08aztask-stored:x"])
def test_a_damaged_reference_is_a_damaged_value(data):
    assert stored_in(data) is None
    with pytest.raises(DecodeError):
        Codec().decode_value(data)


def test_a_value_that_is_a_reference_is_recognised():
    codec = Codec()
    assert stored_in(codec.encode_value(STORED)) == STORED
    for value in (None, "text", [STORED], {"a": STORED}):
        assert stored_in(codec.encode_value(value)) is None
    assert stored_in(None) is None
    assert stored_in(b"") is None


def test_large_arguments_are_encoded_only_for_a_store():
    large = b"x" * (17 << 20)
    with pytest.raises(ContentRefused, match="16777216 allowed"):
        Codec().encode_arguments((large,), {}, large=True)
    codec = Codec(load=lambda stored: b"")
    with pytest.raises(ContentRefused, match="16777216 allowed"):
        codec.encode_arguments((large,), {})
    body, _, _ = codec.encode_arguments((large,), {}, large=True)
    assert codec.decode_arguments(replace(MESSAGE, payload=None, body=body)) == ((large,), {})
