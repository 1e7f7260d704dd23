"""The intake of a queue with sessions, over the local broker in memory."""

import threading
import time
from types import SimpleNamespace

import pytest
import waiting

from aztask.message.envelope import Envelope
from aztask.queues.base import Lost, QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Abandon, Complete, Lapse
from aztask.worker.intake.sessions import HELD_PER_WORKED, SessionIntake
from aztask.worker.ports import QueueSource

PATIENCE = 10.0


def wait_until(condition):
    waiting.wait_until(condition, PATIENCE, "what the test waits for")


class Bench:
    """An intake whose deliveries the test settles by hand."""

    def __init__(self, most=2, share=60.0, lease=30.0):
        self.database = Database(":memory:")
        self.broker = LocalBroker(self.database)
        self.broker.declare("orders", QueueOptions(sessions=True))
        self.taken = []
        self.seconds = lease
        self.lock = threading.Lock()
        self.intake = SessionIntake(
            self.broker,
            QueueSource("orders", 0.2),
            self,
            most=most,
            share=share,
        )

    def lease(self, queue):
        return self.seconds

    def take(self, slot, deliveries, asked_at):
        with self.lock:
            self.taken += [(slot, delivery) for delivery in deliveries]

    def send(self, *names):
        """Names like "a1": the session is the letter."""
        self.broker.send("orders", [Envelope(name.encode(), session=name[0]) for name in names])

    def names(self):
        with self.lock:
            return [delivery.envelope.body.decode() for _, delivery in self.taken]

    def end(self, name, settlement=Complete(), settled=True):
        """What the supervisor does when a delivery is done with."""
        with self.lock:
            slot, delivery = next(
                pair for pair in reversed(self.taken) if pair[1].envelope.body == name.encode()
            )
        if settled:
            slot.receiver.settle([(delivery, settlement)])
        lapse = isinstance(settlement, Lapse)
        slot.ended(SimpleNamespace(settled=settled, left_to_lapse=lapse, delivery=delivery))
        return slot

    def close(self):
        self.intake.stop()
        for name in self.names():
            self.end(name, settled=False)
        assert self.intake.join(PATIENCE)
        self.intake.close()
        self.database.close()


@pytest.fixture
def bench(request):
    made = Bench(**getattr(request, "param", {}))
    yield made
    made.close()


def test_one_message_of_a_session_at_a_time_and_several_sessions(bench):
    bench.send("a1", "a2", "b1", "b2")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: sorted(bench.names()) == ["a1", "b1"])
    bench.end("a1")
    wait_until(lambda: bench.names()[2:] == ["a2"])
    bench.end("b1")
    wait_until(lambda: bench.names()[3:] == ["b2"])


@pytest.mark.parametrize("bench", [{"most": 2}], indirect=True)
def test_no_more_sessions_than_it_may_have(bench):
    bench.send("a1", "b1", "c1")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: len(bench.names()) == 2)
    time.sleep(0.1)
    assert sorted(bench.names()) == ["a1", "b1"]
    bench.end("a1")
    wait_until(lambda: bench.names()[2:] == ["c1"])


@pytest.mark.parametrize("bench", [{"most": 1}], indirect=True)
def test_sessions_that_only_wait_leave_their_place_to_others_up_to_a_limit(bench):
    bench.send(*(f"{letter}1" for letter in "abcdef"))
    bench.intake.start()
    bench.intake.allow(100)
    for count in range(1, HELD_PER_WORKED + 1):
        wait_until(lambda count=count: len(bench.names()) == count)
        bench.taken[-1][0].held()
    time.sleep(0.1)
    assert len(bench.names()) == HELD_PER_WORKED
    first = bench.names()[0]
    bench.end(first, Abandon())
    wait_until(lambda: bench.names().count(first) == 2)


def test_no_room_no_session_and_what_is_at_hand_is_let_go_below_zero(bench):
    bench.send("a1", "a2")
    bench.intake.start()
    time.sleep(0.1)
    assert bench.names() == []
    bench.intake.allow(1)
    wait_until(lambda: bench.names() == ["a1"])
    bench.intake.allow(-1)
    bench.end("a1")
    time.sleep(0.1)
    assert bench.names() == ["a1"]
    bench.intake.allow(1)
    wait_until(lambda: bench.names() == ["a1", "a2"])


@pytest.mark.parametrize("bench", [{"most": 1, "share": 0.0}], indirect=True)
def test_with_its_share_used_up_a_session_gives_way(bench):
    bench.send("a1", "a2", "b1", "b2")
    bench.intake.start()
    bench.intake.allow(10)
    for seen in range(4):
        wait_until(lambda seen=seen: len(bench.names()) == seen + 1)
        bench.end(bench.names()[-1])
    assert bench.names() == ["a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("bench", [{"most": 2, "share": 0.0}], indirect=True)
def test_while_another_slot_looks_and_finds_nothing_nobody_waits(bench):
    bench.send("a1", "a2")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: bench.names() == ["a1"])
    wait_until(lambda: bench.intake._looking == 1)
    slot = bench.end("a1")
    wait_until(lambda: bench.names() == ["a1", "a2"])
    assert bench.taken[1][0] is slot


def test_unsettled_it_comes_first_again_with_its_session(bench):
    bench.send("a1", "a2")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: bench.names() == ["a1"])
    bench.end("a1", settled=False)
    wait_until(lambda: bench.names() == ["a1", "a1"])
    assert bench.taken[1][1].delivery_count == 1, "giving a session back counts nothing"
    slot, old = bench.taken[0]
    assert isinstance(slot.receiver.settle([(old, Complete())])[0], Lost)


@pytest.mark.parametrize("bench", [{"lease": 0.5}], indirect=True)
def test_left_to_lapse_it_comes_when_the_lease_has_ended(bench):
    bench.send("a1")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: bench.names() == ["a1"])
    deadline = bench.taken[0][1].deadline
    bench.end("a1", Lapse(), settled=False)
    wait_until(lambda: bench.names() == ["a1", "a1"])
    assert bench.intake._clock.monotonic() >= deadline


def test_idle_when_nothing_is_held_and_nothing_found(bench):
    assert not bench.intake.idle, "it has not looked yet"
    bench.send("a1")
    bench.intake.start()
    bench.intake.allow(10)
    wait_until(lambda: bench.names() == ["a1"])
    time.sleep(0.3)
    assert not bench.intake.idle
    bench.end("a1")
    wait_until(lambda: bench.intake.idle)
