"""What the Storage queue broker refuses before it asks the service anything.

The rest is in the contract suite, which runs on Azurite.
"""

import math

import pytest

from aztask.address.addresses import StorageQueueAddress
from aztask.errors import (
    BrokerError,
    CapabilityError,
    ConfigurationError,
    InvalidQueueName,
    MessageTooLarge,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, QueueOptions
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.queues.storagequeue.kind import CAPABILITIES
from aztask.support.display import Secret


@pytest.fixture
def broker():
    """Of a port on which nothing answers: a test that asks the service fails."""
    address = StorageQueueAddress("shop", "http://127.0.0.1:1/shop", Secret("a2V5"))
    made = StorageQueueBroker(address)
    yield made
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        QueueOptions(sessions=True),
        QueueOptions(duplicate_window=60.0),
        QueueOptions(max_deliveries=5),
        QueueOptions(time_to_live=60.0),
    ],
    ids=str,
)
def test_settings_that_the_service_lacks_are_refused(broker, options):
    with pytest.raises(CapabilityError, match="Storage queues do not have"):
        broker.declare("orders", options)


def test_what_the_service_cannot_do_is_refused(broker):
    with pytest.raises(CapabilityError, match="no sessions"):
        broker.receiver("orders", lease=30.0, session=ANY_SESSION)
    with pytest.raises(CapabilityError, match="cancel the task instead"):
        broker.cancel_scheduled("orders", ["m"])
    with pytest.raises(CapabilityError, match="first 32 messages"):
        broker.peek("orders", after="m")


@pytest.mark.parametrize("lease", [0.0, -1.0, CAPABILITIES.max_lease_seconds + 1, math.nan])
def test_a_lease_that_cannot_be_is_refused(broker, lease):
    with pytest.raises(ConfigurationError, match="is not possible here"):
        broker.receiver("orders", lease=lease)


@pytest.mark.parametrize("name", ["a", "Orders", "orders-poison", "x" * 57])
def test_a_name_that_is_not_allowed_is_refused(broker, name):
    for call in (broker.declare, broker.delete, broker.stats, broker.peek, broker.purge):
        with pytest.raises(InvalidQueueName):
            call(name)


def test_a_check_leaves_room_for_what_a_message_gathers(broker):
    envelope = Envelope(b"x" * 40_000)
    broker.check(envelope)
    with pytest.raises(MessageTooLarge):
        broker.check(envelope, reserve=10_000)


def test_a_send_that_cannot_be_is_refused_as_a_whole(broker):
    with pytest.raises(ConfigurationError, match="a delay"):
        broker.send("orders", [Envelope(b"x"), Envelope(b"y", delay=-1.0)])
    broker.send("orders", [])


def test_a_closed_broker_says_so(broker):
    broker.close()
    for call in (broker.declare, broker.stats, broker.peek):
        with pytest.raises(BrokerError, match="was closed"):
            call("orders")
