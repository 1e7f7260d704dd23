"""Leases: exclusive, renewable, and lost when they end."""

import threading

import pytest
from subjects import bodies, settle

from aztask.errors import CapabilityError
from aztask.queues.base import Lost, Renewed, Settled, Unknown
from aztask.settlement import Abandon, Complete, DeadLetter, Release

FAR = 1e6


def test_a_leased_message_is_nobody_elses(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    subject.one(subject.receiver(queue))
    subject.assert_nothing(subject.receiver(queue))
    subject.assert_nothing(subject.receiver(queue, broker=subject.another()))


def test_a_lapsed_lease_gives_the_message_to_others(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    first = subject.one(subject.receiver(queue))
    subject.lapse()
    again = subject.one(subject.receiver(queue))
    assert again.envelope.body == b"x"
    assert again.delivery_count == 2
    assert again.token != first.token


@pytest.mark.parametrize("settlement", [Complete(), Abandon(), DeadLetter("late")])
def test_settling_after_the_lapse_is_lost_and_changes_nothing(subject, settlement):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    late = subject.one(receiver)
    subject.lapse()
    other = subject.receiver(queue)
    again = subject.one(other)
    (answer,) = settle(receiver, settlement, late)
    assert isinstance(answer, Lost)
    assert settle(other, Complete(), again) == [Settled()]
    assert subject.peek(queue, dead_letter=True) == []


def test_renewing_after_the_lapse_is_lost(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    late = subject.one(receiver)
    subject.lapse()
    subject.one(subject.receiver(queue))
    deadline = late.deadline
    assert isinstance(receiver.renew([late])[0], Lost)
    assert late.deadline == deadline


def test_renewing_moves_the_deadline_and_keeps_others_away(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver, other = subject.receiver(queue), subject.receiver(queue)
    delivery = subject.one(receiver)
    granted = delivery.deadline
    for _ in range(3):
        subject.pass_time(subject.lease * 0.6)
        (answer,) = receiver.renew([delivery])
        assert isinstance(answer, Renewed)
        assert answer.deadline == delivery.deadline > granted
    subject.assert_nothing(other)
    assert settle(receiver, Complete(), delivery) == [Settled()]


def test_renewing_does_not_raise_the_delivery_count(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    for _ in range(3):
        receiver.renew([delivery])
    settle(receiver, Abandon(), delivery)
    assert subject.one(receiver).delivery_count == 2


def test_a_renewal_may_ask_for_another_length(subject):
    if subject.can.fixed_lease:
        pytest.skip("the queue alone says how long its leases are")
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    before = delivery.deadline
    receiver.renew([delivery], subject.lease * 3)
    assert delivery.lease_seconds == subject.lease * 3
    assert delivery.deadline >= before + subject.lease * 1.9


def test_no_deadline_is_later_than_what_was_asked_for(subject):
    """It counts from before the request was sent, so no other worker has the message before it."""
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver, now = subject.receiver(queue), subject.clock.monotonic
    subject.pass_time(0.25)
    before = now()
    delivery = subject.one(receiver)
    assert before + subject.lease <= delivery.deadline <= now() + subject.lease
    assert delivery.lease_seconds == subject.lease
    before = now()
    receiver.renew([delivery])
    assert before + subject.lease <= delivery.deadline <= now() + subject.lease


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0, 3.0])
def test_after_a_renewal_the_deadline_is_that_of_the_new_length(subject, share):
    """A shorter one too: the message is visible again at the earlier time."""
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver, now = subject.receiver(queue), subject.clock.monotonic
    delivery = subject.one(receiver)
    asked = subject.lease * share
    granted = subject.lease if subject.can.fixed_lease else asked
    before = now()
    (answer,) = receiver.renew([delivery], asked)
    assert before + granted <= delivery.deadline <= now() + granted
    assert answer == Renewed(delivery.deadline)
    assert delivery.lease_seconds == granted
    other = subject.receiver(queue)
    subject.assert_nothing(other)  # connected, which may take seconds on a busy machine
    left = max(1.0, min(5.0, granted / 2))
    subject.pass_time(delivery.deadline - now() - left)
    subject.assert_nothing(other)
    subject.pass_time(left + subject.coarse)
    assert subject.one(other).envelope.body == b"x"
    assert isinstance(settle(receiver, Complete(), delivery)[0], Lost)


def test_an_update_grants_no_more_than_it_asks_for(subject):
    if not subject.can.update:
        return
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver, now = subject.receiver(queue), subject.clock.monotonic
    delivery = subject.one(receiver)
    for asked in (subject.lease, 3 * subject.lease):
        receiver.renew([delivery], asked)
        before = now()
        receiver.update(delivery, type(delivery.envelope)(b"y"))
        assert before + asked <= delivery.deadline <= now() + asked


def test_one_lost_among_many_is_told_apart(subject):
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"lost")
    lost = subject.one(receiver)
    subject.lapse()
    settle(receiver, Complete(), subject.one(receiver))
    subject.send(queue, *(b"%d" % number for number in range(6)))
    held = subject.take(receiver, 6)
    batch = [*held[:3], lost, *held[3:]]
    assert [type(answer) for answer in receiver.renew(batch)] == [
        *[Renewed] * 3,
        Lost,
        *[Renewed] * 3,
    ]
    assert [type(answer) for answer in settle(receiver, Complete(), *batch)] == [
        *[Settled] * 3,
        Lost,
        *[Settled] * 3,
    ]
    subject.lapse()
    subject.assert_nothing(receiver)


def test_an_empty_batch_has_no_answers(subject):
    receiver = subject.receiver(subject.queue())
    assert receiver.renew([]) == []
    assert receiver.settle([]) == []


def test_closing_a_receiver_does_not_end_its_leases(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    subject.one(receiver)
    receiver.close()
    subject.assert_nothing(subject.receiver(queue))
    subject.lapse()
    assert subject.one(subject.receiver(queue)).delivery_count == 2


def test_content_can_be_replaced_in_place(subject):
    queue = subject.queue()
    subject.send(queue, b"old", message_id="m", headers={"page": 0})
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    changed = type(delivery.envelope)(b"new", {"page": 7}, "m")
    if not subject.can.update:
        with pytest.raises(CapabilityError):
            receiver.update(delivery, changed)
        return
    subject.pass_time(subject.lease * 0.6)
    assert isinstance(receiver.update(delivery, changed), Renewed)
    subject.pass_time(subject.lease * 0.6)
    subject.assert_nothing(receiver)
    settle(receiver, Abandon(), delivery)
    again = subject.one(receiver)
    assert again.envelope == changed
    assert again.delivery_count == 2


def test_a_lost_lease_cannot_replace_content(subject):
    if not subject.can.update:
        return
    queue = subject.queue()
    subject.send(queue, b"old")
    receiver = subject.receiver(queue)
    late = subject.one(receiver)
    subject.lapse()
    again = subject.one(receiver)
    answer = receiver.update(late, type(late.envelope)(b"new"))
    assert isinstance(answer, Lost)
    settle(receiver, Abandon(), again)
    assert subject.one(receiver).envelope.body == b"old"


def test_two_receivers_never_hold_one_message(subject):
    queue = subject.queue()
    subject.send(queue, *(b"%d" % number for number in range(60)))
    taken: list[list[bytes]] = [[], []]
    brokers = [subject.broker, subject.another()]

    def work(index):
        receiver = subject.receiver(queue, broker=brokers[index])
        while deliveries := receiver.receive(3, subject.silence):
            taken[index] += bodies(deliveries)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken[0] + taken[1]) == sorted(b"%d" % number for number in range(60))


def test_eight_threads_share_a_receiver(subject):
    queue = subject.queue()
    subject.send(queue, *(b"%d" % number for number in range(80)))
    receiver = subject.receiver(queue)
    done: list[bytes] = []

    def renew(deliveries):
        """As the lease keeper does: where there is no answer yet, it asks again."""
        waiting = deliveries
        while waiting:
            answers = zip(waiting, receiver.renew(waiting), strict=True)
            waiting = []
            for delivery, answer in answers:
                if isinstance(answer, Unknown):
                    assert answer.untouched
                    waiting.append(delivery)
                else:
                    assert isinstance(answer, Renewed)

    def work():
        while deliveries := receiver.receive(4, subject.silence):
            renew(deliveries)
            assert settle(receiver, Complete(), *deliveries) == [Settled()] * len(deliveries)
            done.extend(bodies(deliveries))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == sorted(b"%d" % number for number in range(80))
    subject.assert_nothing(receiver)


def test_a_release_gives_back_and_does_not_count_where_the_service_can(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    assert settle(receiver, Release(), subject.one(receiver)) == [Settled()]
    assert subject.one(receiver).delivery_count == (1 if subject.can.release else 2)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), float("inf"), FAR * 10])
def test_a_lease_that_cannot_be_is_refused(subject, lease):
    with pytest.raises(Exception, match="lease"):
        subject.receiver(subject.queue(), lease=lease)


def test_another_lease_holds_from_the_next_receive_on(subject):
    queue = subject.queue()
    subject.send(queue, b"x", b"y")
    receiver = subject.receiver(queue)
    first = subject.one(receiver)
    longer = 3.0 * first.lease_seconds
    receiver.set_lease(longer)
    second = subject.one(receiver)
    fixed = subject.broker.capabilities.fixed_lease
    assert second.lease_seconds == (first.lease_seconds if fixed else longer)
    if not fixed:
        assert second.deadline - first.deadline > 1.5 * first.lease_seconds
    assert settle(receiver, Complete(), first, second) == [Settled(), Settled()]
