"""Messages that a channel has delivered and that are not acknowledged yet."""

import pytest

from aztask import App
from aztask.lease.keeper import LeaseKeeper
from aztask.message.envelope import Envelope
from aztask.settlement import Abandon, Complete
from aztask.transport.unacked import Unacked, UnackedDelivery, log_lost


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
    log_lost(holdings[1].lease)
    assert "the lease of message b of queue orders was lost" in caplog.text


def test_it_knows_whether_a_receiver_has_messages_out(held):
    unacked, holdings = held
    receiver = holdings[0].receiver
    assert unacked.holds(receiver)
    assert not unacked.holds(object())
    for tag in (1, 2, 3):
        unacked.settle(tag, Complete())
    assert not unacked.holds(receiver)


def test_a_message_that_was_deleted_at_receipt_has_no_lease(held):
    _, holdings = held
    gone = UnackedDelivery(9, holdings[0].receiver, holdings[0].delivery)
    assert not gone.lapsed()
