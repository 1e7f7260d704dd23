"""Kombu's message dict into an envelope and back."""

import zlib

import pytest

from aztask.celery.transport.routing import (
    LONGEST_DELAY,
    seconds_early,
    to_envelope,
    to_message,
)
from aztask.errors import ContentRefused, DecodeError, EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.encryption import Cipher
from aztask.message.envelope import Envelope

NOW = 1_577_836_800.0  # 2020-01-01


def published(body=b"x", headers=None, **properties):
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {"delivery_mode": 2, **properties},
    }


def test_the_body_travels_raw_and_the_properties_in_their_places():
    envelope = to_envelope(
        published(
            body="ü",
            headers={"h": 1},
            message_id="m",
            correlation_id="c",
            type="t",
            session="s",
            reply_to="r",
            priority=3,
            user_id=None,
        ),
        NOW,
    )
    assert envelope == Envelope(
        body="ü".encode(),
        headers={"h": 1},
        message_id="m",
        content_type="application/json",
        content_encoding="utf-8",
        subject="t",
        correlation_id="c",
        session="s",
        properties={"reply_to": "r", "priority": 3},
    )


def test_a_fresh_id_is_given_once_and_kept_for_a_retry_of_the_same_publish():
    message = published()
    first = to_envelope(message, NOW).message_id
    assert len(first) == 36
    assert to_envelope(message, NOW).message_id == first
    assert to_envelope(published(), NOW).message_id != first


@pytest.mark.parametrize(
    ("given", "delay"),
    [
        ({"delay": 5.0}, 5.0),
        ({"countdown": 5}, 5.0),
        ({"headers": {"eta": "2020-01-01T00:00:05+00:00"}}, 5.0),
        ({"headers": {"eta": "2019-01-01T00:00:00+00:00"}}, 0.0),
        ({"headers": {"eta": "2020-01-01T00:00:05+00:00"}, "delay": 0.0}, 0.0),
        ({"headers": {"eta": "2030-01-01T00:00:00+00:00"}}, LONGEST_DELAY),
        ({"headers": {"eta": None}}, 0.0),
    ],
)
def test_delays_become_native(given, delay):
    assert to_envelope(published(**given), NOW).delay == delay


def test_a_message_becomes_visible_some_seconds_before_its_eta():
    eta = {"headers": {"eta": "2020-01-01T00:00:05+00:00"}}
    assert to_envelope(published(**eta), NOW, lead=2.0).delay == 3.0
    assert to_envelope(published(**eta), NOW, lead=9.0).delay == 0.0
    assert to_envelope(published(delay=5.0), NOW, lead=2.0).delay == 5.0, "no eta to hold it until"


def test_a_property_that_is_no_plain_value_is_dropped():
    envelope = to_envelope(published(own="x", number=5, signal=object(), nothing=None), NOW)
    assert envelope.properties == {"own": "x", "number": 5}


def test_a_very_long_countdown_gets_an_eta_to_be_chained_by():
    envelope = to_envelope(published(countdown=30 * 86400), NOW)
    assert envelope.delay == LONGEST_DELAY
    assert envelope.headers["eta"] == "2020-01-31T00:00:00+00:00"
    assert seconds_early(envelope, NOW + LONGEST_DELAY) == 30 * 86400 - LONGEST_DELAY


def test_an_expiration_in_milliseconds_becomes_a_time():
    assert to_envelope(published(expiration="1500"), NOW).expires_at == NOW + 1.5
    assert to_envelope(published(expires_at=5.0), NOW).expires_at == 5.0


@pytest.mark.parametrize(
    "given",
    [
        {"countdown": "soon"},
        {"countdown": -1},
        {"countdown": float("nan")},
        {"headers": {"eta": "tomorrow"}},
        {"headers": {"eta": ["x"]}},
        {"expiration": "never"},
        {"expiration": "nan"},
        {"expiration": "-5"},
        {"message_id": "x" * 129},
        {"message_id": 7},
    ],
)
def test_delays_that_cannot_be_are_refused(given):
    with pytest.raises(EncodeError):
        to_envelope(published(**given), NOW)


def test_what_was_published_is_what_is_received():
    sent = published(headers={"h": 1}, correlation_id="c", type="t", session="s", reply_to="r")
    received = to_message(to_envelope(sent, NOW), MessageLimits())
    assert received["body"] == b"x"
    assert (received["content_type"], received["content_encoding"]) == ("application/json", "utf-8")
    assert received["headers"] == {"h": 1}
    assert {**received["properties"], **sent["properties"]} == received["properties"]


def test_a_compressed_body_comes_out_plain_and_bounded():
    headers = {"compression": "application/x-gzip", "h": 1}
    envelope = Envelope(body=zlib.compress(b"x" * 100), headers=headers)
    received = to_message(envelope, MessageLimits(body_bytes=100))
    assert received["body"] == b"x" * 100
    assert received["headers"] == {"h": 1}
    with pytest.raises(ContentRefused, match="99 allowed"):
        to_message(envelope, MessageLimits(body_bytes=99))
    with pytest.raises(DecodeError):
        to_message(Envelope(body=b"x", headers=headers), MessageLimits())


@pytest.mark.parametrize(
    ("eta", "left"),
    [
        ("2020-01-01T00:00:05Z", 5.0),
        ("2020-01-01T00:00:00.050Z", pytest.approx(0.05)),
        ("2019-12-31T00:00:00Z", 0.0),
        ("not a date", None),
        (None, None),
    ],
)
def test_how_early_a_message_is(eta, left):
    assert seconds_early(Envelope(b"", headers={"eta": eta}), NOW) == left


def test_what_aztask_has_encrypted_is_refused_in_one_line():
    body = Cipher([bytes(32)], encrypt=True).encrypt(b"[[], {}, {}]", "arguments", "id-1", "")
    with pytest.raises(ContentRefused, match="a Celery worker has no key for them") as raised:
        to_message(Envelope(body=body, headers={"task": "t", "id": "id-1"}), MessageLimits())
    assert "\n" not in str(raised.value)
