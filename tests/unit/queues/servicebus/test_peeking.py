"""Looking at a queue of the emulator, page by page."""

import pytest

from aztask.address.urls import parse_broker
from aztask.errors import QueueNotFound
from aztask.message.envelope import Envelope
from aztask.queues.base import MessageState, QueueOptions
from aztask.queues.servicebus import inspection
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.inspection import Peeking
from aztask.settlement import DeadLetter
from aztask.testing import emulator

LEASE = 30.0


@pytest.fixture(scope="module")
def bus():
    with emulator() as running:
        yield running


@pytest.fixture(scope="module")
def broker(bus):
    made = ServiceBusBroker(parse_broker(bus.connection_string), admin=bus.admin_connection_string)
    yield made
    made.close()


@pytest.fixture(scope="module")
def peeking(bus):
    client = BusClient(parse_broker(bus.connection_string))
    made = Peeking(client)
    yield made
    made.close()
    client.finish()


@pytest.fixture
def queue(broker, request):
    name = f"q{abs(hash(request.node.name))}"
    broker.declare(name, QueueOptions(lease=LEASE))
    return name


def bodies(found):
    return [each.envelope.body for each in found]


def test_a_page_begins_behind_a_position(broker, peeking, queue):
    broker.send(queue, [Envelope(b"%d" % n) for n in range(5)])
    page = peeking.page(queue, limit=2)
    assert bodies(page) == [b"0", b"1"]
    assert bodies(peeking.page(queue, after=page[-1].position, limit=10)) == [b"2", b"3", b"4"]


def test_what_is_asked_for_is_found_over_all_pages(broker, peeking, queue, monkeypatch):
    monkeypatch.setattr(inspection, "PAGE", 2)
    broker.send(queue, [Envelope(b"%d" % n) for n in range(5)])
    assert bodies(peeking.all(queue, lambda each: each.envelope.body > b"1")) == [
        b"2",
        b"3",
        b"4",
    ]
    monkeypatch.setattr(inspection, "MAX_COUNTED", 2)
    assert len(peeking.all(queue, lambda each: True)) == 2


def test_counting_by_looking(broker, peeking, queue):
    broker.send(queue, [Envelope(b"a"), Envelope(b"b"), Envelope(b"c", delay=600.0)])
    receiver = broker.receiver(queue, lease=LEASE)
    receiver.settle([(receiver.receive(1, 5.0)[0], DeadLetter("why", "because"))])
    stats = peeking.counted(queue)
    assert (stats.active, stats.scheduled, stats.dead) == (1, 1, 1)
    (dead,) = peeking.page(queue, dead_letter=True, limit=10)
    assert (dead.dead_letter_reason, dead.dead_letter_description) == ("why", "because")
    (later,) = peeking.all(queue, lambda each: each.state is MessageState.SCHEDULED)
    assert later.due is not None


def test_a_queue_with_sessions_is_looked_at_over_a_senders_connection(broker, peeking, queue):
    name = f"{queue}-sessions"
    broker.declare(name, QueueOptions(lease=LEASE, sessions=True))
    broker.send(name, [Envelope(b"x", session="a")])
    for _ in range(2):
        (found,) = peeking.page(name, limit=10)
        assert (found.envelope.body, found.envelope.session) == (b"x", "a")
    assert name in peeking._with_sessions


def test_a_missing_queue_is_named(peeking):
    with pytest.raises(QueueNotFound, match="nowhere"):
        peeking.page("nowhere", limit=1)
