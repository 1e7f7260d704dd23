"""The local broker's receiver on a clock that stands still, over a real engine in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from still import Still

from aztask.errors import AlreadySettled, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, QueueOptions, ReceiverOptions
from aztask.queues.delivery import Delivery, Renewed, Settled
from aztask.queues.engine import Database, WakeUp
from aztask.queues.local import receiver as local_receiver
from aztask.queues.local.broker import LocalBroker
from aztask.queues.local.receiver import (
    GONE,
    REST_SECONDS,
    LocalReceiver,
    sequence_number,
)
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    with_envelope,
)
from aztask.support.clock import Clock

NOW = 1000.0
LEASE = 30.0
CLONE = with_envelope(Resubmit(5.0), Envelope(b"clone"), 5.0)
ALL = (Complete(), Abandon(), Release(), Defer(), DeadLetter("why", "because"), CLONE)


class Bench:
    """A receiver of the queue "q". waits: what it waited for, while `meanwhile` happens."""

    def __init__(self, monkeypatch):
        self.time = Still(NOW)
        self.ahead = 500_000.0
        clock = Clock(monotonic=self.time.monotonic, wall=lambda: self.time.now + self.ahead)
        self.database = Database(":memory:")
        self.broker = LocalBroker(self.database, clock=clock)
        self.broker.declare("q")
        self.receiver = self.open()
        self.waits: list[float] = []
        self.changes = 0
        self.meanwhile = lambda: None
        monkeypatch.setattr(local_receiver, "time", SimpleNamespace(monotonic=self.time.monotonic))
        self.watch(self.receiver)

    def open(self, **options):
        return self.broker.receiver("q", **{"lease": LEASE, **options})

    def watch(self, receiver):
        """Instead of waiting time passes."""

        def wait(seconds, rung):
            self.waits.append(seconds)
            before = rung()
            self.meanwhile()
            if not rung() or before:
                self.time.now += seconds

        def found_change():
            self.changes += 1

        receiver._waiter = SimpleNamespace(wait=wait, found_change=found_change)

    def send(self, *bodies, **properties):
        self.broker.send("q", [Envelope(body, **properties) for body in bodies])

    def take(self, *bodies, receiver=None):
        """Deliveries of new messages."""
        self.send(*bodies)
        taken = (receiver or self.receiver).receive(len(bodies), 0.0)
        assert [each.envelope.body for each in taken] == list(bodies)
        return taken

    def peek(self, **options):
        return self.broker.peek("q", **options)


@pytest.fixture
def bench(monkeypatch):
    made = Bench(monkeypatch)
    yield made
    made.database.close()


# -- receiving ---------------------------------------------------------------------------------


def test_a_delivery_is_what_was_sent_under_a_lease_that_begins_now(bench):
    bench.send(b"x", message_id="id", headers={"a": 1})
    bench.time.now += 5.0
    (delivery,) = bench.receiver.receive(1, 0.0)
    assert delivery.envelope == Envelope(b"x", {"a": 1}, "id")
    assert (delivery.queue, delivery.position, delivery.delivery_count) == ("q", 1, 1)
    assert delivery.enqueued_at == NOW + bench.ahead
    assert (delivery.deadline, delivery.lease_seconds) == (NOW + 5.0 + LEASE, LEASE)
    assert (delivery.session, delivery.dead_letter_reason) == (None, None)
    assert bench.waits == []


def test_no_more_than_asked_for(bench):
    bench.send(b"1", b"2", b"3")
    assert len(bench.receiver.receive(2, 0.0)) == 2
    assert len(bench.receiver.receive(2, 0.0)) == 1


def test_what_is_there_is_taken_at_once_and_only_so_much(bench):
    bench.send(b"1", b"2")
    (first,) = bench.receiver.receive(1, 7.0)
    assert (first.envelope.body, bench.waits) == (b"1", [])
    assert bench.broker.stats("q").leased == 1


def test_another_lease_holds_from_the_next_receive_on(bench):
    (first,) = bench.take(b"1")
    bench.receiver.set_lease(60.0)
    (second,) = bench.take(b"2")
    assert (first.deadline, second.deadline) == (NOW + LEASE, NOW + 60.0)
    assert (first.lease_seconds, second.lease_seconds) == (LEASE, 60.0)
    (answer,) = bench.receiver.renew([first])
    assert answer == Renewed(NOW + 60.0)


def test_with_no_time_to_wait_it_looks_once(bench):
    assert bench.receiver.receive(1, 0.0) == []
    assert bench.waits == []


def test_with_nothing_in_sight_it_waits_for_all_the_time_that_it_has(bench):
    assert bench.receiver.receive(1, 7.0) == []
    assert bench.waits == [7.0]
    assert bench.time.now == NOW + 7.0


def test_it_looks_again_when_something_falls_due(bench):
    bench.send(b"x", delay=3.0)
    (delivery,) = bench.receiver.receive(1, 7.0)
    assert bench.waits == [3.0]
    assert delivery.deadline == NOW + 3.0 + LEASE


def test_it_looks_again_when_a_lease_ends(bench):
    bench.take(b"x", receiver=bench.open(lease=2.0))
    (delivery,) = bench.receiver.receive(1, 7.0)
    assert (bench.waits, delivery.delivery_count) == ([2.0], 2)


def test_a_receiver_of_dead_letters_waits_for_those(bench):
    (delivery,) = bench.take(b"x")
    graveyard = bench.open(dead_letter=True)
    bench.watch(graveyard)
    bench.meanwhile = lambda: bench.receiver.settle([(delivery, DeadLetter("why"))])
    (dead,) = graveyard.receive(1, 7.0)
    assert (dead.dead_letter_reason, bench.waits) == ("why", [7.0])


def test_a_receiver_takes_the_living_and_does_not_delete_them_unless_told(bench):
    bench.send(b"x")
    engine = bench.broker.engine
    receiver = LocalReceiver(engine, bench.broker.wakeup("q"), ReceiverOptions("q", LEASE))
    (delivery,) = receiver.receive(1, 0.0)
    assert receiver.settle([(delivery, Complete())]) == [Settled()]


def test_what_falls_due_too_late_is_not_waited_for_longer_than_there_is_time(bench):
    bench.send(b"x", delay=9.0)
    assert bench.receiver.receive(1, 7.0) == []
    assert bench.waits == [7.0]


def test_a_send_ends_the_wait(bench):
    bench.meanwhile = lambda: bench.send(b"x")
    (delivery,) = bench.receiver.receive(1, 7.0)
    assert delivery.envelope.body == b"x"
    assert (bench.waits, bench.time.now) == ([7.0], NOW)


def test_a_wait_that_brought_no_change_is_not_followed_by_a_look(bench, monkeypatch):
    looks = []
    pending = bench.broker.engine.pending

    def note(*args, **options):
        looks.append(args)
        return pending(*args, **options)

    monkeypatch.setattr(bench.broker.engine, "pending", note)
    ends = iter([1.0, 2.0, 4.0])

    def wait(seconds, rung):
        bench.waits.append(seconds)
        bench.time.now += next(ends)

    bench.receiver._waiter.wait = wait
    assert bench.receiver.receive(1, 7.0) == []
    assert bench.waits == [7.0, 6.0, 4.0]
    assert len(looks) == 1
    assert bench.changes == 1


def test_each_change_is_looked_at_and_reported_to_the_wait(bench):
    sent = iter([(b"later", 99.0), (b"now", 0.0)])

    def send_the_next():
        body, delay = next(sent)
        bench.send(body, delay=delay)

    bench.meanwhile = send_the_next
    (delivery,) = bench.receiver.receive(1, 7.0)
    assert delivery.envelope.body == b"now"
    assert bench.changes == 3


def test_while_the_sessions_are_held_it_looks_again_soon(bench):
    bench.broker.declare("s", QueueOptions(sessions=True))
    bench.broker.send("s", [Envelope(b"1", session="a"), Envelope(b"2", session="a")])
    holder = bench.broker.receiver("s", lease=LEASE, session="a")
    assert len(holder.receive(1, 0.0)) == 1
    waiting = bench.broker.receiver("s", lease=LEASE, session=ANY_SESSION)
    bench.watch(waiting)
    assert waiting.receive(1, 0.175) == []
    assert bench.waits == pytest.approx([0.05, 0.05, 0.05, 0.025])
    assert bench.changes == 1, "nothing has changed since the first look"


@pytest.mark.parametrize("whole", [True, False])
def test_closing_ends_the_wait_and_every_later_one(bench, whole):
    bench.meanwhile = bench.broker.close if whole else bench.receiver.close
    assert bench.receiver.receive(1, 7.0) == []
    assert bench.time.now == NOW
    bench.meanwhile = lambda: None
    assert bench.receiver.receive(1, 7.0) == []
    assert len(bench.waits) == 1


def test_a_closed_receiver_takes_nothing_although_there_is_something(bench):
    bench.send(b"x")
    bench.receiver.close()
    assert bench.receiver.receive(1, 0.0) == []
    assert len(bench.open().receive(1, 0.0)) == 1


def test_it_looks_for_other_processes_at_most_so_often(bench):
    waiter = bench.open()._waiter
    assert REST_SECONDS == 0.012
    assert (waiter._rest, waiter._blind) == (REST_SECONDS, REST_SECONDS)


def test_received_and_deleted_it_is_gone_and_cannot_be_settled(bench):
    (delivery,) = bench.take(b"x", receiver=bench.open(delete=True))
    assert bench.peek() == []
    with pytest.raises(AlreadySettled, match="received and deleted"):
        bench.receiver.settle([(delivery, Complete())])


def test_a_bell_wakes_who_waits_only_of_what_has_happened():
    woken = []
    wakeup = WakeUp(SimpleNamespace(wake=lambda: woken.append(wakeup.count)))
    wakeup.notify(committed=False)
    assert woken == []
    wakeup.notify()
    wakeup.notify(True)
    assert woken == [1, 2], "woken, they see that it has rung"
    assert not wakeup.closed
    wakeup.close()
    assert wakeup.closed
    assert woken == [1, 2, 3]


# -- by position -------------------------------------------------------------------------------


def test_deferred_messages_come_by_position_and_ordinary_ones_do_not(bench):
    aside, ordinary = bench.take(b"aside", b"ordinary")
    bench.receiver.settle([(aside, Defer()), (ordinary, Abandon())])
    bench.receiver.set_lease(60.0)
    (found,) = bench.receiver.receive_deferred([str(aside.position), ordinary.position, 99])
    assert found.envelope.body == b"aside"
    assert (found.deadline, found.lease_seconds) == (NOW + 60.0, 60.0)
    (gone,) = bench.receiver.receive_deferred([]) or [None]
    assert gone is None


def test_dead_letters_come_by_position_whether_deferred_or_not(bench):
    one, two = bench.take(b"1", b"2")
    bench.receiver.settle([(one, DeadLetter("a", "b")), (two, DeadLetter("c"))])
    graveyard = bench.open(dead_letter=True)
    (found,) = graveyard.receive_deferred([two.position])
    assert (found.dead_letter_reason, found.dead_letter_description) == ("c", "")
    assert bench.receiver.receive_deferred([one.position]) == []
    assert graveyard.settle([(found, Complete())]) == [Settled()]
    assert [each.envelope.body for each in bench.peek(dead_letter=True)] == [b"1"]


def test_by_position_too_a_receiver_may_receive_and_delete(bench):
    (aside,) = bench.take(b"x")
    bench.receiver.settle([(aside, Defer())])
    assert len(bench.open(delete=True).receive_deferred([aside.position])) == 1
    assert bench.peek() == []


@pytest.mark.parametrize(
    ("position", "number"),
    [(0, 0), ("7", 7), (-1, -1), (-5, -1), (2**63 - 2, 2**63 - 2), (2**63 - 1, 2**63 - 2)],
)
def test_a_position_becomes_a_number_that_the_engine_can_take(position, number):
    assert sequence_number(position) == number


def test_what_is_no_position_is_refused():
    with pytest.raises(ConfigurationError, match="'x' is not a position"):
        sequence_number("x")


# -- renewing and updating ---------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [None, 5.0, 300.0])
def test_a_renewal_counts_from_now(bench, seconds):
    (delivery,) = bench.take(b"x")
    bench.time.now += 10.0
    until = NOW + 10.0 + (seconds or LEASE)
    assert bench.receiver.renew([delivery], seconds) == [Renewed(until)]
    assert (delivery.deadline, delivery.lease_seconds) == (until, seconds or LEASE)
    (looked,) = bench.broker.engine.peek("q")
    assert looked.lease_until == until


def test_a_lost_lease_in_a_batch_keeps_its_deadline(bench):
    first, stale, last = bench.take(b"1", b"2", b"3")
    bench.receiver.settle([(stale, Complete())])
    bench.time.now += 10.0
    assert bench.receiver.renew([first, stale, last]) == [
        Renewed(NOW + 40.0), GONE, Renewed(NOW + 40.0),
    ]  # fmt: skip
    assert stale.deadline == NOW + LEASE


def test_an_update_replaces_the_content_here_and_there_and_renews(bench):
    (delivery,) = bench.take(b"old")
    bench.time.now += 10.0
    new = Envelope(b"new", {"a": 1})
    assert bench.receiver.update(delivery, new) == Renewed(NOW + 10.0 + LEASE)
    assert delivery.envelope == new
    bench.receiver.settle([(delivery, Abandon())])
    assert bench.receiver.receive(1, 0.0)[0].envelope == new


@pytest.mark.parametrize(("renewed", "lease"), [(60.0, 60.0), (5.0, LEASE)])
def test_an_update_grants_what_the_lease_was_extended_to(bench, renewed, lease):
    (delivery,) = bench.take(b"old")
    bench.receiver.renew([delivery], renewed)
    bench.receiver.update(delivery, Envelope(b"new"))
    assert (delivery.deadline, delivery.lease_seconds) == (NOW + lease, lease)


def test_an_update_under_a_lost_lease_changes_nothing(bench):
    (delivery,) = bench.take(b"old")
    bench.time.now += LEASE
    assert bench.receiver.update(delivery, Envelope(b"new")) == GONE
    assert (delivery.envelope.body, delivery.deadline) == (b"old", NOW + LEASE)
    assert bench.peek()[0].envelope.body == b"old"


def test_dead_letters_are_renewed_and_updated_in_their_own_place(bench):
    bench.receiver.settle([(bench.take(b"x")[0], DeadLetter("why"))])
    graveyard = bench.open(dead_letter=True)
    (dead,) = graveyard.receive(1, 0.0)
    assert graveyard.renew([dead], 60.0) == [Renewed(NOW + 60.0)]
    assert graveyard.update(dead, Envelope(b"y")) == Renewed(NOW + 60.0)
    assert bench.receiver.renew([dead]) == [GONE]
    assert bench.receiver.update(dead, Envelope(b"z")) == GONE


# -- settling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("dead_letter", [False, True])
def test_each_settlement_does_what_it_says(bench, how, dead_letter):
    receiver = bench.receiver
    (delivery,) = bench.take(b"x")
    if dead_letter:
        receiver.settle([(delivery, DeadLetter("first"))])
        receiver = bench.open(dead_letter=True)
        (delivery,) = receiver.receive(1, 0.0)
    assert receiver.settle([(delivery, how)]) == [Settled()]
    queue = [(each.envelope.body, each.state.value) for each in bench.peek()]
    dead = [(each.envelope.body, each.dead_letter_reason) for each in bench.peek(dead_letter=True)]
    here = [(b"x", "first")] if dead_letter else []
    match how:
        case Complete():
            assert (queue, dead) == ([], [])
        case Abandon() | Release():
            assert (queue, dead) == ([] if dead_letter else [(b"x", "active")], here)
            (again,) = receiver.receive(1, 0.0)
            counted = 2 if isinstance(how, Abandon) else 1
            assert again.delivery_count == counted + dead_letter
        case Defer():
            assert (queue, dead) == ([] if dead_letter else [(b"x", "deferred")], here)
            assert receiver.receive(1, 0.0) == []
        case DeadLetter():
            assert (queue, dead) == ([], [(b"x", "why")])
        case Resubmit():
            assert (queue, dead) == ([(b"clone", "scheduled")], [])
            assert bench.peek()[0].due == NOW + bench.ahead + 5.0


@pytest.mark.parametrize("how", ALL)
def test_nothing_is_settled_twice(bench, how):
    (delivery,) = bench.take(b"x")
    bench.receiver.settle([(delivery, how)])
    with pytest.raises(AlreadySettled, match="message 1 of queue 'q' was already settled"):
        bench.receiver.settle([(delivery, Complete())])


@pytest.mark.parametrize("how", ALL)
def test_a_lost_lease_is_told_as_lost_every_time(bench, how):
    (delivery,) = bench.take(b"x")
    bench.time.now += LEASE
    for _ in range(2):
        assert bench.receiver.settle([(delivery, how)]) == [GONE]
    assert not delivery.settled
    assert len(bench.peek()) == 1


@pytest.mark.parametrize("how", ALL)
def test_of_a_batch_each_member_has_its_own_answer_and_its_own_mark(bench, how):
    (stale,) = bench.take(b"stale")
    bench.time.now += LEASE
    (again,) = bench.open(lease=600.0).receive(1, 0.0)
    first, last = bench.take(b"1", b"2")
    batch = [first, stale, last]
    assert bench.receiver.settle([(each, how) for each in batch]) == [Settled(), GONE, Settled()]
    assert [each.settled for each in batch] == [True, False, True]
    assert bench.receiver.renew([again]) == [Renewed(bench.time.now + LEASE)]


@pytest.mark.parametrize("how", [Complete(), Release()])
def test_a_batch_of_20_000_with_one_stale_member(bench, how):
    bench.send(*[b"x"] * 20_000)
    taken = bench.receiver.receive(20_000, 0.0)
    bench.receiver.settle([(taken[777], Complete())])
    taken[777].settled = False
    answers = bench.receiver.settle([(each, how) for each in taken])
    assert answers.pop(777) == GONE
    assert answers == [Settled()] * 19_999
    assert bench.broker.stats("q").active == (0 if isinstance(how, Complete) else 19_999)


def test_a_mixed_batch_of_dead_letters_is_settled_where_they_lie(bench):
    taken = bench.take(b"0", b"1", b"2")
    bench.receiver.settle([(each, DeadLetter("why")) for each in taken])
    graveyard = bench.open(dead_letter=True)
    dead = graveyard.receive(3, 0.0)
    pairs = list(zip(dead, (Complete(), Release(), CLONE), strict=True))
    assert graveyard.settle(pairs) == [Settled()] * 3
    assert [each.envelope.body for each in bench.peek(dead_letter=True)] == [b"1"]
    assert [each.envelope.body for each in bench.peek()] == [b"clone"]


def test_what_goes_back_wakes_who_waits_and_what_is_completed_does_not(bench):
    wakeup = bench.broker.wakeup("q")
    for how in ALL:
        (delivery,) = bench.take(b"x")
        count = wakeup.count
        bench.receiver.settle([(delivery, how)])
        assert (wakeup.count == count) is isinstance(how, Complete), how
        bench.broker.purge("q")


@pytest.mark.parametrize("how", [Complete(), Abandon()])
def test_who_waits_is_woken_and_marks_hold_only_when_the_transaction_ends_well(bench, how):
    (delivery,) = bench.take(b"x")
    wakeup = bench.broker.wakeup("q")
    count = wakeup.count
    with pytest.raises(ZeroDivisionError), bench.broker.transaction():
        bench.receiver.settle([(delivery, how)])
        assert delivery.settled
        assert wakeup.count == count
        raise ZeroDivisionError
    assert (delivery.settled, wakeup.count) == (False, count)
    with bench.broker.transaction():
        bench.receiver.settle([(delivery, how)])
    assert delivery.settled
    assert wakeup.count == count + isinstance(how, Abandon)


def test_a_batch_with_one_that_cannot_be_settled_changes_nothing(bench):
    first, second = bench.take(b"1", b"2")
    with pytest.raises(ConfigurationError, match="needs its clone"):
        bench.receiver.settle([(first, Abandon()), (second, Resubmit())])
    foreign = Delivery("q", Envelope(b""), 1, "t", 1, 0.0, NOW, LEASE)
    with pytest.raises(ConfigurationError, match="another broker"):
        bench.receiver.settle([(first, Complete()), (foreign, Complete())])
    assert {each.state.value for each in bench.peek()} == {"leased"}
    assert not first.settled


def test_no_settlements_no_answers(bench):
    assert bench.receiver.settle([]) == []
    assert bench.receiver.renew([]) == []
