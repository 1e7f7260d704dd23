"""Envelopes as Service Bus messages: what is native, what is packed, what is refused."""

import math

import pytest

from aztask.brokers.servicebus_wire import (
    EXPIRES_AT,
    LONGEST_LIFE,
    PACKED,
    check_name,
    message_of,
)
from aztask.envelope import Envelope
from aztask.errors import ConfigurationError, EncodeError, InvalidQueueName, MessageTooLarge

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
    with pytest.raises(MessageTooLarge, match="takes 1000"):
        message_of(Envelope(b"x" * 900, {"h": "y" * 100}), NOW, 1000)


def test_a_message_just_below_the_limit_is_taken():
    envelope = Envelope(b"x" * 500, {"h": "y" * 100})
    assert message_of(envelope, NOW, 1000).application_properties == {"h": "y" * 100}


def test_an_id_longer_than_the_services_is_refused():
    with pytest.raises(EncodeError, match="128"):
        message_of(Envelope(b"x", message_id="i" * 129), NOW)


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "sales/eu/orders", "9", "q" * 260])
def test_names_that_the_service_takes(name):
    check_name(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a/../b", ".", "-a", "q" * 261, "a\n"])
def test_names_that_it_does_not(name):
    with pytest.raises(InvalidQueueName, match="1 to 260"):
        check_name(name)
