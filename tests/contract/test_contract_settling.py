"""Every settlement, its effect, and what a second one does."""

import pytest
from subjects import bodies, settle

from aztask.errors import AlreadySettled, CapabilityError
from aztask.message.envelope import Envelope
from aztask.queues.base import Lost, MessageState, Renewed, Settled
from aztask.settlement import (
    REASON_LIMIT,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    name_of,
    with_envelope,
)


def test_a_completed_message_is_gone(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    assert settle(receiver, Complete(), subject.one(receiver)) == [Settled()]
    subject.lapse()
    subject.assert_nothing(receiver)


def test_an_abandoned_message_comes_again_at_once(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    assert settle(receiver, Abandon(), subject.one(receiver)) == [Settled()]
    again = subject.one(receiver)
    assert again.envelope.body == b"x"
    assert again.delivery_count == 2


@pytest.mark.parametrize(
    "settlement", [Complete(), Abandon(), DeadLetter("why"), Release(), Resubmit()]
)
def test_a_second_settlement_is_an_error_and_has_no_effect(subject, settlement):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    if isinstance(settlement, Resubmit):
        settlement = with_envelope(settlement, Envelope(b"clone"), 0.0)
    settle(receiver, Complete(), delivery)
    with pytest.raises(AlreadySettled):
        settle(receiver, settlement, delivery)
    subject.lapse()
    subject.assert_nothing(receiver)
    assert subject.peek(queue, dead_letter=True) == []


def test_a_resubmitted_message_comes_as_its_clone_after_the_delay(subject):
    queue = subject.queue()
    subject.send(queue, b"original", message_id="t:0:0")
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    clone = Envelope(b"clone", {"hop": 1}, "t:0:1")
    assert settle(receiver, with_envelope(Resubmit(2.0), clone, 2.0), delivery) == [Settled()]
    subject.assert_nothing(receiver)
    subject.pass_time(2.0 + subject.coarse)
    again = subject.one(receiver)
    assert again.envelope.body == b"clone"
    assert dict(again.envelope.headers) == {"hop": 1}
    settle(receiver, Complete(), again)
    subject.lapse()
    subject.assert_nothing(receiver)


def test_a_clone_without_delay_comes_at_once(subject):
    queue = subject.queue()
    subject.send(queue, b"original")
    receiver = subject.receiver(queue)
    settle(receiver, with_envelope(Resubmit(), Envelope(b"clone"), 0.0), subject.one(receiver))
    assert subject.one(receiver).envelope.body == b"clone"


def test_a_clone_under_a_new_id_is_no_duplicate(subject):
    if not subject.can.duplicate_detection:
        return
    queue = subject.queue(duplicate_window=60.0)
    subject.send(queue, b"original", message_id="t:0:0")
    receiver = subject.receiver(queue)
    for hop in (1, 2):
        clone = Envelope(b"clone", message_id=f"t:0:{hop}")
        settle(receiver, with_envelope(Resubmit(), clone, 0.0), subject.one(receiver))
    assert subject.one(receiver).envelope.message_id == "t:0:2"


def test_a_dead_letter_keeps_its_content_and_says_why(subject):
    queue = subject.queue()
    subject.send(queue, b"x", message_id="m", headers={"task": "a.b"})
    receiver = subject.receiver(queue)
    assert settle(receiver, DeadLetter("why", "because"), subject.one(receiver)) == [Settled()]
    subject.assert_nothing(receiver)
    (peeked,) = subject.peek(queue, dead_letter=True)
    assert (peeked.dead_letter_reason, peeked.dead_letter_description) == ("why", "because")
    dead = subject.one(subject.receiver(queue, dead_letter=True))
    assert (dead.dead_letter_reason, dead.dead_letter_description) == ("why", "because")
    assert dead.envelope == Envelope(b"x", {"task": "a.b"}, "m")


def test_the_longest_reason_fits(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    settle(receiver, DeadLetter("r" * 5000, "ü" * 5000), subject.one(receiver))
    dead = subject.one(subject.receiver(queue, dead_letter=True))
    assert dead.dead_letter_reason == "r" * REASON_LIMIT
    assert dead.dead_letter_description == "ü" * REASON_LIMIT


def test_a_dead_letter_is_replayed_by_sending_and_completing(subject):
    queue = subject.queue()
    subject.send(queue, b"x", message_id="t:0:0")
    receiver = subject.receiver(queue)
    settle(receiver, DeadLetter("why"), subject.one(receiver))
    graveyard = subject.receiver(queue, dead_letter=True)
    dead = subject.one(graveyard)
    replayed = Envelope(dead.envelope.body, dead.envelope.headers, "t:1:0")
    subject.broker.send(queue, [replayed])
    assert settle(graveyard, Complete(), dead) == [Settled()]
    assert subject.one(receiver).envelope == replayed
    subject.lapse()
    subject.assert_nothing(graveyard)


def test_a_dead_letter_is_replayed_by_resubmitting_it(subject):
    if not subject.can.atomic_resubmit:
        return
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    settle(receiver, DeadLetter("why"), subject.one(receiver))
    graveyard = subject.receiver(queue, dead_letter=True)
    clone = Envelope(b"x", message_id="t:1:0")
    settle(graveyard, with_envelope(Resubmit(), clone, 0.0), subject.one(graveyard))
    assert subject.one(receiver).envelope == clone
    subject.lapse()
    subject.assert_nothing(graveyard)


def test_dead_letters_are_held_under_leases_too(subject):
    queue = subject.queue()
    subject.send(queue, b"x")
    receiver = subject.receiver(queue)
    settle(receiver, DeadLetter("why"), subject.one(receiver))
    graveyard = subject.receiver(queue, dead_letter=True)
    dead = subject.one(graveyard)
    subject.assert_nothing(graveyard)
    settle(graveyard, Abandon(), dead)
    dead = subject.one(graveyard)
    subject.lapse()
    assert subject.one(graveyard).envelope.body == b"x"


def test_a_deferred_message_is_received_by_its_position_alone(subject):
    queue = subject.queue()
    subject.send(queue, b"aside", b"other")
    receiver = subject.receiver(queue)
    aside, other = sorted(subject.take(receiver, 2), key=lambda each: each.envelope.body)
    if not subject.can.defer:
        with pytest.raises(CapabilityError):
            settle(receiver, Defer(), aside)
        with pytest.raises(CapabilityError):
            receiver.receive_deferred([aside.position])
        return
    assert settle(receiver, Defer(), aside) == [Settled()]
    settle(receiver, Complete(), other)
    subject.lapse()
    subject.assert_nothing(receiver)
    (found,) = receiver.receive_deferred([aside.position])
    assert found.envelope.body == b"aside"
    assert found.delivery_count == 2
    assert receiver.receive_deferred([aside.position]) == []
    settle(receiver, Abandon(), found)
    subject.assert_nothing(receiver)
    (found,) = receiver.receive_deferred([aside.position])
    assert settle(receiver, Complete(), found) == [Settled()]
    assert receiver.receive_deferred([aside.position]) == []


def test_a_deferred_message_keeps_its_place_through_every_lease(subject):
    """Renewed, lapsed, given back, released, deferred again: it stays among the deferred, and a
    look at its position finds it until it is settled for good."""
    if not subject.can.defer:
        return  # refused: see above
    queue = subject.queue(max_deliveries=50)
    subject.send(queue, b"aside", b"dead")
    receiver = subject.receiver(queue)
    aside, dead = sorted(subject.take(receiver, 2), key=lambda each: each.envelope.body)
    settle(receiver, Defer(), aside, dead)
    positions = [aside.position, dead.position]

    def looked_at():
        page = subject.broker.peek(queue, after=positions[0] - 1, limit=1)
        return [(each.position, each.state) for each in page]

    assert looked_at() == [(positions[0], MessageState.DEFERRED)]
    counts = []
    for how in (None, Abandon(), Release(), Defer()):
        (found,) = receiver.receive_deferred(positions[:1])
        counts.append(found.delivery_count)
        assert isinstance(receiver.renew([found])[0], Renewed)
        if how is None:
            subject.lapse()
        else:
            assert settle(receiver, how, found) == [Settled()]
        subject.assert_nothing(receiver)
    assert counts[:2] == [2, 3], "each receipt raises the count"
    found = receiver.receive_deferred(positions)
    assert [each.position for each in found] == positions
    answers = receiver.settle([(found[0], Complete()), (found[1], DeadLetter("why"))])
    assert answers == [Settled(), Settled()]
    assert bodies(subject.peek(queue, dead_letter=True)) == [b"dead"]
    assert looked_at() == []


def test_dead_letters_by_position(subject):
    queue = subject.queue()
    subject.send(queue, b"first", b"second", b"third")
    receiver = subject.receiver(queue)
    settle(receiver, DeadLetter("why"), *subject.take(receiver, 3))
    graveyard = subject.receiver(queue, dead_letter=True)
    position = {p.envelope.body: p.position for p in subject.peek(queue, dead_letter=True)}
    if not subject.can.dead_by_position:
        if subject.can.defer:  # of the dead letters too, only those that were set aside
            assert graveyard.receive_deferred([position[b"second"]]) == []
        return
    third, second = position[b"third"], position[b"second"]
    got = graveyard.receive_deferred([third, second])
    assert sorted(bodies(got)) == [b"second", b"third"]
    assert got[0].dead_letter_reason == "why"
    assert graveyard.receive_deferred([third]) == []  # leased
    assert settle(graveyard, Release(), *got) == [Settled(), Settled()]
    assert receiver.receive_deferred([third]) == []  # not among the living
    (got,) = graveyard.receive_deferred([second])
    settle(graveyard, Complete(), got)
    subject.assert_all(bodies(subject.take(graveyard, 2)), [b"first", b"third"])


def test_a_batch_of_different_settlements(subject):
    queue = subject.queue()
    subject.send(queue, b"complete", b"abandon", b"release", b"dead", b"again")
    receiver = subject.receiver(queue)
    taken = {delivery.envelope.body: delivery for delivery in subject.take(receiver, 5)}
    clone = with_envelope(Resubmit(), Envelope(b"clone"), 0.0)
    answers = receiver.settle(
        [
            (taken[b"complete"], Complete()),
            (taken[b"abandon"], Abandon()),
            (taken[b"release"], Release()),
            (taken[b"dead"], DeadLetter("why")),
            (taken[b"again"], clone),
        ]
    )
    assert answers == [Settled()] * 5
    assert sorted(bodies(subject.take(receiver, 3))) == [b"abandon", b"clone", b"release"]
    assert bodies(subject.peek(queue, dead_letter=True)) == [b"dead"]


@pytest.mark.parametrize(
    "how", [Complete(), Abandon(), Release(), DeadLetter("stale"), Resubmit()], ids=name_of
)
def test_a_batch_does_nothing_to_what_another_worker_holds_by_now(subject, how):
    """Of 25, as many as the local engine settles with one statement."""
    queue = subject.queue()
    subject.send(queue, b"stale")
    receiver, other = subject.receiver(queue), subject.receiver(queue)
    stale = subject.one(receiver)
    subject.lapse()
    again = subject.one(other)
    subject.send(queue, *(b"%d" % number for number in range(24)))
    batch = subject.take(receiver, 24)
    batch.insert(7, stale)
    pairs = []
    for delivery in batch:
        clone = Envelope(delivery.envelope.body + b" again")
        each = with_envelope(how, clone, 0.0) if isinstance(how, Resubmit) else how
        pairs.append((delivery, each))
    answers = receiver.settle(pairs)
    # a release goes unanswered where it is not a request of its own (Service Bus)
    assert isinstance(answers.pop(7), Lost) or isinstance(how, Release)
    assert answers == [Settled()] * 24
    assert isinstance(other.renew([again])[0], Renewed)
    assert b"stale" not in bodies(subject.peek(queue, dead_letter=True))
    assert settle(other, Complete(), again) == [Settled()]
    if isinstance(how, Resubmit) and not subject.can.atomic_resubmit:
        return  # its clone was sent first, and is there
    left = 0 if isinstance(how, Complete | DeadLetter) else 24
    assert b"stale" not in b" ".join(bodies(subject.take(receiver, left)))
    subject.assert_nothing(receiver)


def test_a_batch_of_dead_letters_keeps_each_ones_reason(subject):
    queue = subject.queue()
    subject.send(queue, b"0", b"1", b"2", b"3")
    receiver = subject.receiver(queue)
    taken = subject.take(receiver, 4)
    reasons = {
        delivery.envelope.body: DeadLetter(
            f"reason {delivery.envelope.body!r}", f"because of {delivery.envelope.body!r}"
        )
        for delivery in taken
    }
    pairs = [(delivery, reasons[delivery.envelope.body]) for delivery in taken]
    assert receiver.settle(pairs) == [Settled()] * 4
    dead = subject.peek(queue, dead_letter=True)
    assert {
        each.envelope.body: DeadLetter(
            each.dead_letter_reason or "", each.dead_letter_description or ""
        )
        for each in dead
    } == reasons


def test_the_services_own_limit_ends_in_the_dead_letters(subject):
    if not subject.can.native_dead_letter:
        return
    queue = subject.queue(max_deliveries=2)
    subject.send(queue, b"poison")
    receiver = subject.receiver(queue)
    settle(receiver, Abandon(), subject.one(receiver))
    settle(receiver, Abandon(), subject.one(receiver))
    subject.assert_nothing(receiver)
    (dead,) = subject.peek(queue, dead_letter=True)
    assert dead.dead_letter_reason == "MaxDeliveryCountExceeded"


def test_a_queues_own_time_to_live_takes_messages_out_of_the_way(subject):
    if not subject.can.native_dead_letter:
        return
    queue = subject.queue(time_to_live=2.0)
    subject.send(queue, b"short-lived")
    subject.pass_time(2.0 + subject.coarse)
    subject.assert_nothing(subject.receiver(queue))
