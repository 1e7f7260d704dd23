"""Messages that a channel has delivered and that are not acknowledged yet."""

import threading

import pytest

from aztask import App
from aztask.celery.transport.unacked import LogLost, Unacked, UnackedDelivery
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.settlement import Abandon, Complete, DeadLetter


@pytest.fixture
def broker():
    app = App("shop", broker="local://:memory:")
    app.broker.declare("orders")
    app.broker.send("orders", [Envelope(b"x", message_id=name) for name in "abc"])
    yield app.broker
    app.close()


@pytest.fixture
def held(broker):
    """(the unacknowledged messages, with the tags 1 to 3)."""
    keeper = LeaseKeeper(broker).start()
    receiver = broker.receiver("orders", lease=30.0)
    unacked = Unacked(keeper)
    holdings = [
        UnackedDelivery(tag, receiver, delivery)
        for tag, delivery in enumerate(receiver.receive(3, 1.0), 1)
    ]
    unacked.hold(receiver, holdings, 30.0)
    yield unacked, holdings
    keeper.stop()
    receiver.close()


def test_each_message_is_settled_once(held, broker, caplog):
    unacked, holdings = held
    assert not holdings[0].lapsed()
    assert unacked.tags_up_to(2) == [1, 2]
    assert unacked.settle(1, Complete())
    assert not unacked.settle(1, Complete())
    assert "message 1 is not held here" in caplog.text
    unacked.give_back([2, 3], Abandon())
    assert len(unacked) == 0
    assert (broker.stats("orders").active, broker.stats("orders").leased) == (2, 0)


def test_a_message_whose_lease_ended_is_dropped_and_logged(held, caplog):
    unacked, holdings = held
    unacked.drop(holdings[0])
    assert unacked.tags_up_to(9) == [2, 3]
    assert "message a of queue orders waited here until its lease expired" in caplog.text
    LogLost().lost(holdings[1].lease)
    assert "the lease of message b of queue orders was lost" in caplog.text


def test_it_knows_whether_a_receiver_has_messages_out(held):
    unacked, holdings = held
    receiver = holdings[0].receiver
    assert unacked.holds(receiver)
    assert not unacked.holds(object())
    for tag in (1, 2, 3):
        unacked.settle(tag, Complete())
    assert not unacked.holds(receiver)


class Answering:
    """A receiver whose settlements are answered in turn; then all are confirmed."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.settled = []

    def settle(self, pairs):
        answers = self.answers.pop(0) if self.answers else [Settled()] * len(pairs)
        if isinstance(answers, Exception):
            raise answers
        self.settled += [delivery.envelope.message_id for delivery, _ in pairs]
        return answers


@pytest.fixture
def remote(broker, monkeypatch):
    """A function: (the unacknowledged messages of a remote broker, its receiver)."""
    monkeypatch.setattr("aztask.celery.transport.unacked.FIRST_PAUSE", 0.0)
    keeper = LeaseKeeper(broker)

    def made(*answers, session=None):
        receiver, unacked = Answering(*answers), Unacked(keeper, remote=True)
        deliveries = broker.receiver("orders", lease=30.0).receive(3, 1.0)
        for each in deliveries:
            each.session = session
        holdings = [UnackedDelivery(tag, receiver, each) for tag, each in enumerate(deliveries, 1)]
        unacked.hold(receiver, holdings, 30.0)
        return unacked, receiver

    return made


def test_on_a_remote_broker_an_acknowledgement_is_carried_out_in_the_background(remote):
    unacked, receiver = remote()
    assert [unacked.settle(tag, Complete()) for tag in (1, 2, 3)] == [True] * 3
    assert len(unacked) == 0
    unacked.close()
    assert sorted(receiver.settled) == ["a", "b", "c"]


@pytest.mark.parametrize("first", [[Unknown("no answer")], OSError("no answer")])
def test_one_that_gets_no_answer_is_repeated_or_delivered_again(remote, first, caplog):
    unacked, receiver = remote(first)
    unacked.settle(1, Complete())
    unacked.close()
    again = isinstance(first, list)
    assert receiver.settled == (["a", "a"] if again else [])
    assert ("they are delivered again" in caplog.text) != again


def test_an_unexpected_error_of_one_repetition_harms_no_neighbour(remote, caplog):
    unacked, receiver = remote([Unknown("no answer")] * 2, ValueError("bad frame"))
    held = [unacked._holdings[tag] for tag in (1, 2)]
    unacked._settle_batch([(each, each.lease, Complete()) for each in held])
    assert receiver.settled[2:] == ["b"], "the first raises, the second is completed"
    assert "could not complete a message; it is delivered again" in caplog.text


def test_one_whose_lease_was_lost_is_logged(remote, caplog):
    unacked, _ = remote([Lost("another worker took it")])
    unacked.settle(1, Complete())
    unacked.close()
    assert "too late to complete message a of queue orders" in caplog.text


def test_a_message_of_a_session_is_completed_before_the_next_one_comes(remote):
    unacked, receiver = remote(session="customer-7")
    unacked.settle(1, Complete())
    assert receiver.settled == ["a"]


def test_an_event_loop_waits_for_no_settlement_and_a_session_still_waits_for_its_own(remote):
    unacked, receiver = remote(session="customer-7")
    held, allowed = [], threading.Event()
    settle = receiver.settle

    def slow(pairs):
        held.append(unacked.holds(receiver))
        assert allowed.wait(10)
        return settle(pairs)

    receiver.settle = slow
    assert unacked.settle(1, DeadLetter("rejected", "by a consumer"), background=True)
    assert unacked.settle(2, Complete(), background=True)
    assert unacked.settle(3, Complete(), background=True)
    assert receiver.settled == [], "it has not waited"
    assert unacked.holds(receiver), "the next message of the session has to wait"
    allowed.set()
    unacked.close()
    assert receiver.settled == ["a", "b", "c"]
    assert not unacked.holds(receiver)
    assert held[0]


def test_a_message_that_was_deleted_at_receipt_has_no_lease(held):
    _, holdings = held
    gone = UnackedDelivery(9, holdings[0].receiver, holdings[0].delivery)
    assert not gone.lapsed()
