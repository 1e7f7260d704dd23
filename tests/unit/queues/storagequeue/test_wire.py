"""Envelopes as Storage queue text: there and back, limits, and what is not ours."""

import base64

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import CapabilityError, ConfigurationError, EncodeError, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.storagequeue.wire import (
    ENVELOPE_LIMIT,
    LONGEST_DELAY,
    SEND_LIMIT,
    TEXT_LIMIT,
    UNREADABLE,
    dead_text_of,
    read_text,
    text_of,
    whole_seconds,
)
from aztask.settlement import REASON_LIMIT, DeadLetter

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary()
headers = st.dictionaries(st.text(), plain | st.lists(plain), max_size=5)


@given(body=st.binary(max_size=2000), headers=headers, message_id=st.text(max_size=40))
def test_an_envelope_comes_back_as_it_was(body, headers, message_id):
    envelope = Envelope(body, headers, message_id, subject="s", expires_at=1.5, properties={"a": 1})
    written = read_text(text_of(envelope))
    assert written.envelope == envelope
    assert (written.due, written.delay, written.hidden, written.dead) == (None, None, 0, None)


def test_delays_are_noted():
    written = read_text(text_of(Envelope(b"x"), due=10.5, delay=3, hidden=2))
    assert (written.due, written.delay, written.hidden) == (10.5, 3.0, 2)


def overhead(limit):
    """The largest body that fits `limit`."""
    size = limit // 4 * 3
    while True:
        try:
            text_of(Envelope(bytes(size)), limit=limit)
        except MessageTooLarge:
            size -= 1
        else:
            return size


def test_exactly_the_limit_fits_and_one_byte_more_does_not():
    largest = overhead(SEND_LIMIT)
    assert len(text_of(Envelope(bytes(largest)))) <= SEND_LIMIT
    with pytest.raises(MessageTooLarge, match="61440"):
        text_of(Envelope(bytes(largest + 1)))
    assert ENVELOPE_LIMIT - largest < 64


def test_room_is_left_for_what_a_message_gathers():
    largest = overhead(SEND_LIMIT)
    grown = Envelope(bytes(largest), {"aztask-hop": 1, "note": "n" * 2000})
    assert len(text_of(grown, limit=TEXT_LIMIT)) <= TEXT_LIMIT


def test_a_reason_that_fits_is_kept_whole():
    dead = DeadLetter("r" * REASON_LIMIT, "ü" * REASON_LIMIT)
    assert read_text(dead_text_of(Envelope(b"x"), "", dead)).dead == dead


def test_a_reason_that_would_overflow_is_cut_and_the_content_is_not():
    envelope = Envelope(bytes(overhead(SEND_LIMIT)), message_id="m")
    text = dead_text_of(envelope, "", DeadLetter("r" * 1024, "\N{PILE OF POO}" * 1024))
    written = read_text(text)
    assert len(text) <= TEXT_LIMIT
    assert written.envelope == envelope
    assert written.dead.reason.startswith("rrrr")
    assert len(written.dead.description) >= 100


@pytest.mark.parametrize("size", range(TEXT_LIMIT // 4 * 3 - 60, TEXT_LIMIT // 4 * 3 - 30))
def test_at_the_very_edge_the_content_is_kept_in_any_case(size):
    envelope = Envelope(bytes(size))
    original = "o" * TEXT_LIMIT
    text = dead_text_of(envelope, original, DeadLetter("reason", "description"))
    assert len(text) <= TEXT_LIMIT
    assert text == original or read_text(text).envelope.body == envelope.body


def test_foreign_text_of_full_length_is_kept_as_it_is():
    text = "x" * TEXT_LIMIT
    written = read_text(text)
    assert dead_text_of(written.envelope, text, DeadLetter("undecodable", "why")) == text


def packed(value):
    return base64.b64encode(msgpack.packb(value)).decode()


GOOD = {"v": 1, "headers": {}, "properties": {}, "body": b""}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "ü€",
        "====",
        packed(1),
        packed([1, 2]),
        packed({**GOOD, "v": 2}),
        packed({**GOOD, "body": "text"}),
        packed({**GOOD, "headers": []}),
        packed({**GOOD, "properties": {"message_id": 5}}),
        packed({**GOOD, "properties": {"due": "soon"}}),
        packed({**GOOD, "properties": {"due": float("nan")}}),
        packed({**GOOD, "properties": {"dead": ["one"]}}),
        packed({**GOOD, "properties": {"properties": 1}}),
        packed(GOOD)[:-4],
        base64.b64encode(b"\xdd\xff\xff\xff\xff").decode(),
        base64.b64encode(b"\x91" * 40_000).decode(),
        packed({1: 2}),
    ],
    ids=range(18),
)
def test_what_is_not_ours_is_plain_bytes(text):
    written = read_text(text)
    assert written.envelope == Envelope(text.encode(), content_type=UNREADABLE)


@given(st.text())
def test_no_text_is_an_error(text):
    read_text(text)


def test_headers_that_cannot_be_written():
    with pytest.raises(EncodeError, match="'m'"):
        text_of(Envelope(b"x", {"a": object()}, "m"))


def test_sessions_are_refused():
    with pytest.raises(CapabilityError, match="session"):
        text_of(Envelope(b"x", session="s"))


@pytest.mark.parametrize(
    ("delay", "seconds"), [(0, 0), (0.1, 1), (1.0, 1), (1.2, 2), (8 * 86400, LONGEST_DELAY)]
)
def test_delays_are_whole_seconds_and_never_early(delay, seconds):
    assert whole_seconds(delay) == seconds


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_what_is_no_delay(delay):
    with pytest.raises(ConfigurationError, match="delay"):
        whole_seconds(delay)
