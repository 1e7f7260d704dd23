"""What the Service Bus broker refuses, and how it learns the service's time, on the emulator.

The rest is in the contract suite.
"""

import math

import pytest

from aztask.address.urls import parse_broker
from aztask.errors import BrokerError, ConfigurationError, InvalidQueueName, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.testing import emulator

LEASE = 30.0


@pytest.fixture(scope="module")
def bus():
    with emulator() as running:
        yield running


@pytest.fixture
def broker(bus):
    made = ServiceBusBroker(
        parse_broker(bus.connection_string),
        admin=bus.admin_connection_string,
        max_message_bytes=10_000,
    )
    made.declare("q", QueueOptions(lease=LEASE))
    yield made
    made.close()


@pytest.mark.parametrize("lease", [0.0, -1.0, 301.0, math.nan])
def test_a_lease_that_cannot_be_is_refused(broker, lease):
    with pytest.raises(ConfigurationError, match="is not possible here"):
        broker.receiver("q", lease=lease)


def test_a_lease_that_is_not_the_queues_is_refused_and_both_are_named(broker):
    with pytest.raises(ConfigurationError, match="for 30 s, not for 60 s"):
        broker.receiver("q", lease=60.0)
    broker.receiver("q", lease=60.0, dead_letter=True)


def test_a_changed_lock_duration_is_read_again_after_declare(broker):
    broker.receiver("q", lease=LEASE)
    broker.declare("q", QueueOptions(lease=60.0))
    broker.receiver("q", lease=60.0)


@pytest.mark.parametrize("name", ["", "/q", "q/", "a//b", "a/../b", "x" * 261])
def test_a_name_that_is_not_allowed_is_refused(broker, name):
    for call in (broker.declare, broker.delete, broker.stats, broker.peek, broker.purge):
        with pytest.raises(InvalidQueueName):
            call(name)
    with pytest.raises(InvalidQueueName):
        broker.send(name, [Envelope(b"x")])


def test_the_size_limit_is_the_brokers_own(broker):
    assert broker.capabilities.max_message_bytes == 10_000
    envelope = Envelope(b"x" * 8_000)
    broker.check(envelope)
    with pytest.raises(MessageTooLarge):
        broker.check(envelope, reserve=2_000)
    with pytest.raises(MessageTooLarge):
        broker.send("q", [Envelope(b"x" * 20_000)])


def test_the_services_time_is_learned_before_the_first_delay(broker):
    assert not broker._service_clock.known
    broker.send("q", [Envelope(b"now")])
    assert not broker._service_clock.known
    broker.send("q", [Envelope(b"later", delay=600.0)])
    assert broker._service_clock.known
    assert abs(broker._service_clock.offset) < 30.0


def test_closing_ends_receivers_and_refuses_further_calls(broker):
    receiver = broker.receiver("q", lease=LEASE)
    broker.close()
    assert receiver._closed
    for call in (broker.declare, broker.stats, broker.peek):
        with pytest.raises(BrokerError, match="was closed"):
            call("q")
