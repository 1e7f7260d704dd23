"""Sending to Service Bus: batches, idle connections, and times that the service writes."""

import time

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import MessageSizeExceededError

from aztask.address.urls import parse_broker
from aztask.errors import MessageTooLarge, QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.servicebus import senders as senders_module
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.inspection import Peeking
from aztask.queues.servicebus.senders import MAX_SENDERS, Senders, _batches
from aztask.support.clock import SYSTEM_CLOCK
from aztask.testing import emulator


class Batch(list):
    """Takes two messages."""

    max_size_in_bytes = 2

    def add_message(self, message):
        if len(self) == 2 or message == "huge":
            raise MessageSizeExceededError(message="too large")
        self.append(message)


class Sender:
    def create_message_batch(self):
        return Batch()


def batches(*pairs):
    return [(list(batch), count) for batch, count in _batches(Sender(), pairs)]


def test_messages_are_split_by_size_and_by_key_and_stay_in_order():
    plain, tenant = Envelope(b""), Envelope(b"", session="a")
    found = batches((plain, 1), (plain, 2), (plain, 3), (tenant, 4), (plain, 5))
    assert found == [([1, 2], 2), ([3], 1), ([4], 1), ([5], 1)]


def test_one_message_needs_no_batch_and_none_sends_nothing():
    message = ServiceBusMessage(b"x")
    assert list(_batches(Sender(), [(Envelope(b""), message)])) == [(message, 1)]
    assert batches() == []


def test_a_message_that_fits_no_batch_is_refused():
    with pytest.raises(MessageTooLarge, match="'m' is larger"):
        batches((Envelope(b""), 1), (Envelope(b"", message_id="m"), "huge"))


@pytest.fixture(scope="module")
def bus():
    with emulator(queues=["q"]) as running:
        yield running


@pytest.fixture
def client(bus):
    made = BusClient(parse_broker(bus.connection_string))
    yield made
    made.finish()


@pytest.fixture
def senders(client):
    made = Senders(client, "q")
    yield made
    made.close()


def test_a_connection_is_used_again_until_it_breaks(senders):
    with senders.sender() as first:
        pass
    with senders.sender() as second:
        assert second is first
    with pytest.raises(KeyError), senders.sender():
        raise KeyError("whatever happens on it")
    with senders.sender() as third:
        assert third is not first


def test_an_idle_connection_that_the_service_ended_is_not_used(senders, monkeypatch):
    monkeypatch.setattr(senders_module, "IDLE_SECONDS", 0.0)
    with senders.sender() as first:
        pass
    monkeypatch.setattr(senders_module.private, "has_unread", lambda sender: True)
    with senders.sender() as second:
        assert second is not first


def test_connections_are_bounded(senders):
    held = [senders.sender() for _ in range(MAX_SENDERS)]
    for each in held:
        each.__enter__()
    assert not senders._room.acquire(blocking=False)
    held.pop().__exit__(None, None, None)
    assert senders._room.acquire(blocking=False)
    senders._room.release()
    for each in held:
        each.__exit__(None, None, None)


def test_a_sender_that_comes_back_after_the_close_is_closed(client, senders):
    with senders.sender() as used:
        senders.close()
        assert senders_module.private.is_open(used)
    client.finish()
    assert not senders_module.private.is_open(used)
    assert not senders._free


def test_a_missing_queue_is_named(client):
    with pytest.raises(QueueNotFound, match="missing"):
        Senders(client, "missing").send([(Envelope(b"x"), ServiceBusMessage(b"x"))])


def test_a_schedule_is_taken_back_once(senders):
    with senders.sender() as sender:
        (number,) = sender.schedule_messages(
            ServiceBusMessage(b"x"), senders_module.datetime.fromtimestamp(time.time() + 600)
        )
    assert senders.cancelled(number)
    assert not senders.cancelled(number)


def test_a_probe_brings_a_time_and_leaves_nothing(client, senders):
    peeking = Peeking(client)
    found = senders.probed(SYSTEM_CLOCK, lambda number: peeking.messages("q", number, 1))
    assert found.after < found.before
    assert abs(found.time - time.time()) < 30.0
    assert peeking.page("q", limit=10) == []
    peeking.close()
