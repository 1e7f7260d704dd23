"""Deliveries of Service Bus, and settlements as orders."""

import uuid

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from azure.servicebus._pyamqp.message import Header, Message

from aztask.errors import AlreadySettled, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import Delivery
from aztask.queues.servicebus.wire import ages, all_unsettled, delivery_of, verb_of
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit

LOCK = uuid.uuid4()


def received(**annotations):
    annotations = {
        f"x-opt-{name.replace('_', '-')}".encode(): value for name, value in annotations.items()
    }
    message = Message(
        header=Header(delivery_count=2),
        data=[b"body"],
        message_annotations={b"x-opt-sequence-number": 7, **annotations},
        application_properties={b"DeadLetterReason": b"why"},
    )
    return ServiceBusReceivedMessage(message, receiver=None, lock_token=LOCK)


def delivery(*, dead_letter=False, delete=False):
    message = received(enqueued_time=5000)
    return delivery_of(message, "q", 90.0, 30.0, dead_letter=dead_letter, delete=delete)


def test_a_message_becomes_a_delivery():
    made = delivery()
    assert (made.queue, made.position, made.envelope.body) == ("q", 7, b"body")
    assert (made.delivery_count, made.enqueued_at) == (3, 5.0)
    assert (made.deadline, made.lease_seconds) == (90.0, 30.0)
    assert (made.lock, made.token) == (LOCK, str(LOCK))
    assert made.dead_letter_reason is None
    assert delivery(dead_letter=True).dead_letter_reason == "why"


def test_both_times_or_none():
    assert ages(received(enqueued_time=5000, locked_until=65000)) == (5.0, 65.0)
    assert ages(received(enqueued_time=5000)) is None
    assert ages(received(locked_until=5000)) is None


def test_only_unsettled_deliveries_of_ours_are_settled():
    ours = delivery()
    assert all_unsettled([ours]) == [ours]
    with pytest.raises(AlreadySettled, match="message 7 of queue 'q'"):
        all_unsettled([ours, delivery(delete=True)])
    foreign = Delivery("q", Envelope(b""), 1, "t", 1, 0.0, 0.0, 1.0)
    with pytest.raises(ConfigurationError, match="another broker"):
        all_unsettled([foreign])


@pytest.mark.parametrize(
    ("settlement", "verb"),
    [
        (Complete(), "complete"),
        (Resubmit(), "complete"),
        (Abandon(), "abandon"),
        (Release(), "abandon"),
        (Defer(), "defer"),
    ],
)
def test_a_settlement_is_one_of_four_verbs(settlement, verb):
    assert verb_of(settlement) == (verb, "", "")


def test_a_dead_letter_has_its_reason():
    assert verb_of(DeadLetter("why", "because")) == ("dead-letter", "why", "because")
