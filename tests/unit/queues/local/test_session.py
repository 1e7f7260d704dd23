"""The local receiver of sessions, beyond what the contract asks of every broker."""

import os

import pytest

from aztask.errors import LeaseLost, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, QueueOptions, ReceiverOptions, Renewed
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker, LocalSessionReceiver
from aztask.settlement import Complete
from aztask.support.clock import Clock

LEASE = 30.0


class Bench:
    def __init__(self):
        self.now = 1000.0
        self.clock = Clock(monotonic=lambda: self.now, wall=lambda: self.now)
        self.database = Database(":memory:")
        self.broker = LocalBroker(self.database, clock=self.clock)
        self.broker.declare("q", QueueOptions(sessions=True))

    def send(self, *sessions):
        self.broker.send("q", [Envelope(b"x", session=session) for session in sessions])

    def receiver(self, session=ANY_SESSION, **options):
        options = ReceiverOptions("q", LEASE, session, **options)
        return LocalSessionReceiver(self.broker.engine, self.broker.wakeup("q"), options)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.database.close()


def test_a_receiver_of_any_session_goes_on_when_one_is_used_up(bench):
    bench.send("a", "b")
    receiver = bench.receiver()
    for session in ("a", "b"):
        (delivery,) = receiver.receive(10, 0.0)
        assert delivery.session == session
        receiver.settle([(delivery, Complete())])
    assert receiver.receive(10, 0.0) == []


def test_one_renewal_extends_every_lease_of_the_session(bench):
    bench.send("a", "a")
    receiver = bench.receiver()
    first, second = receiver.receive(2, 0.0)
    bench.now += 10.0
    assert receiver.renew([first]) == [Renewed(bench.now + LEASE)]
    assert second.deadline == bench.now + LEASE


def test_a_lost_session_is_accepted_again_by_the_next_receive(bench):
    bench.send("a")
    receiver = bench.receiver("a")
    (delivery,) = receiver.receive(1, 0.0)
    bench.now += LEASE + 1.0
    assert not isinstance(receiver.renew([delivery])[0], Renewed)
    (again,) = receiver.receive(1, 0.0)
    assert again.delivery_count == 2


def test_a_state_that_is_too_large_is_refused_and_the_limit_is_named(bench):
    bench.send("a")
    receiver = bench.receiver("a", max_state_bytes=4)
    receiver.receive(1, 0.0)
    receiver.set_session_state("a", b"1234")
    with pytest.raises(MessageTooLarge, match="5 bytes is too large; 4 are allowed"):
        receiver.set_session_state("a", b"12345")
    assert receiver.session_state("a") == b"1234"


def test_the_state_of_a_session_that_is_not_held_is_refused(bench):
    receiver = bench.receiver("a")
    with pytest.raises(LeaseLost, match="'a'"):
        receiver.session_state("a")


def test_letting_go_gives_messages_back_uncounted(bench):
    bench.send("a")
    receiver = bench.receiver()
    receiver.receive(1, 0.0)
    receiver.let_go()
    (delivery,) = bench.receiver().receive(1, 0.0)
    assert delivery.delivery_count == 1


def test_closing_in_a_forked_child_leaves_the_session_alone(tmp_path):
    bench = Bench()
    bench.database = Database(str(tmp_path / "q.db"))
    bench.broker = LocalBroker(bench.database, clock=bench.clock)
    bench.broker.declare("q", QueueOptions(sessions=True))
    bench.send("a")
    receiver = bench.receiver()
    (delivery,) = receiver.receive(1, 0.0)
    child = os.fork()
    if not child:
        try:
            receiver.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(receiver.renew([delivery])[0], Renewed)
    bench.database.close()
