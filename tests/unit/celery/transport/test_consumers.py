"""The consumers of a channel: which lease they use, and how they receive from sessions."""

import pytest

from aztask import App
from aztask.celery.transport import consumers
from aztask.celery.transport.consumers import ConsumedQueue, QueueConsumer, source_of
from aztask.celery.transport.options import TransportOptions
from aztask.errors import LeaseRefused
from aztask.message.envelope import Envelope
from aztask.queues.base import Capabilities, QueueFacts, QueueOptions
from aztask.settlement import Complete


@pytest.fixture
def broker():
    app = App("shop", broker="local://:memory:")
    yield app.broker
    app.close()


def consumer_of(broker, source, no_ack=False):
    return QueueConsumer(broker, source, no_ack=no_ack, consumer_tag="tag", callback=print)


def send(broker, *messages, queue="orders"):
    envelopes = [Envelope(b"x", message_id=name, session=session) for name, session in messages]
    broker.send(queue, envelopes)


def test_a_consumer_opens_its_receiver_at_the_first_use(broker):
    broker.declare("orders")
    send(broker, *((name, None) for name in "abc"))
    consumer = consumer_of(broker, ConsumedQueue("orders", "orders", 30.0), no_ack=True)
    consumer.close()
    receiver = consumer.receiver
    assert consumer.receiver is receiver
    assert len(consumer.receive(3, 1.0)) == 3
    assert broker.stats("orders").leased == 0, "deleted at receipt"
    consumer.close()
    consumer.reopen(broker)
    assert consumer.receiver is not receiver
    consumer.close()


class FixedLease:
    """A service whose queues decide the lease, and whose receivers know theirs."""

    def __init__(self, lock, readable=True):
        self.capabilities = Capabilities(name="servicebus", fixed_lease=True, sessions=True)
        self.lock = lock
        self.readable = readable
        self.opened = []

    def inspector(self):
        return self

    def facts(self, queue):
        known = {"lease_seconds": self.lock, "sessions": False} if self.readable else {}
        return QueueFacts(queue, exists=True, **known)

    def receiver(self, queue, *, lease, delete, session):
        self.opened.append(lease)
        return self

    def receive(self, limit, wait):
        if abs(self.opened[-1] - self.lock) > 0.5:
            raise LeaseRefused("another lease", actual=self.lock - 0.02)
        return []

    def close(self):
        pass


@pytest.mark.parametrize(
    ("options", "lease", "given"),
    [
        ({}, 45.0, False),
        ({"lease": 30}, 30.0, True),
        ({"lease": 30, "leases": {"orders": 20}}, 20.0, True),
        ({"leases": {"others": 20}}, 45.0, False),
    ],
)
def test_the_queues_own_lock_is_the_lease_unless_one_is_given(monkeypatch, options, lease, given):
    monkeypatch.setattr(consumers, "Inspectable", FixedLease)
    source = source_of(FixedLease(45.0), TransportOptions.read(options), "orders")
    assert (source.lease, source.given) == (lease, given)


def test_a_lock_that_may_not_be_read_is_learned_from_the_messages(monkeypatch, caplog):
    monkeypatch.setattr(consumers, "Inspectable", FixedLease)
    caplog.set_level("INFO")
    broker = FixedLease(45.0, readable=False)
    source = source_of(broker, TransportOptions.read({}), "orders")
    assert source.lease == 60.0
    consumer = consumer_of(broker, source)
    assert consumer.receive(1, 0.0) == []
    assert consumer.receive(1, 0.0) == []
    assert broker.opened == [60.0, 45.0]
    assert "queue orders holds its messages for 45 s" in caplog.text


def test_a_lease_that_was_given_and_is_wrong_stays_an_error():
    broker = FixedLease(45.0)
    options = TransportOptions.read({"lease": 30})
    consumer = consumer_of(broker, source_of(broker, options, "orders"))
    with pytest.raises(LeaseRefused):
        consumer.receive(1, 0.0)


def test_a_queue_with_sessions_is_found_out_and_received_in_order(broker):
    broker.declare("orders", QueueOptions(sessions=True))
    send(broker, ("1", "a"), ("2", "b"), ("3", "a"))
    source = source_of(broker, TransportOptions.read({}), "orders")
    assert source.sessions
    consumer = consumer_of(broker, source)
    got = []
    while found := consumer.receive(32, 0.05):
        got += [(each.envelope.message_id, each.session) for each in found]
        assert len(found) == 1
        consumer.receiver.settle([(found[0], Complete())])
    assert got in ([("1", "a"), ("3", "a"), ("2", "b")], [("2", "b"), ("1", "a"), ("3", "a")])
    consumer.close()


def test_a_busy_session_lets_others_have_their_turn(broker, monkeypatch):
    monkeypatch.setattr(consumers, "SESSION_SHARE", 0.0)
    broker.declare("orders", QueueOptions(sessions=True))
    send(broker, *((f"a{n}", "a") for n in range(5)), ("b", "b"))
    consumer = consumer_of(broker, ConsumedQueue("orders", "orders", 30.0, sessions=True))
    sessions = []
    for _ in range(6):
        (delivery,) = consumer.receive(1, 1.0)
        sessions.append(delivery.session)
        consumer.receiver.settle([(delivery, Complete())])
    assert sessions.index("b") < 5, sessions
    consumer.close()
