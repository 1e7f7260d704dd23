"""Peeking, counting and purging."""

import pytest
from subjects import bodies, settle

from aztask.queues.base import MessageState
from aztask.settlement import Complete, DeadLetter, Defer, Release


def test_peeking_takes_nothing(subject):
    queue = subject.queue()
    subject.send(queue, b"x", message_id="m")
    for _ in range(2):
        (peeked,) = subject.peek(queue)
        assert peeked.envelope.body == b"x"
        assert peeked.envelope.message_id == "m"
        assert peeked.state is MessageState.ACTIVE
        assert peeked.delivery_count == 0
    assert subject.one(subject.receiver(queue)).delivery_count == 1


def test_peeking_pages_through_everything(subject):
    queue = subject.queue()
    sent = [b"%02d" % number for number in range(25)]
    subject.send(queue, *sent)
    if not subject.can.paged_peek:
        seen = bodies(subject.peek(queue, limit=10))
        assert len(set(seen)) == 10
        assert set(seen) <= set(sent)
        return
    seen: list[bytes] = []
    after = None
    while page := subject.peek(queue, after=after, limit=10):
        seen += bodies(page)
        positions = [each.position for each in page]
        assert positions == sorted(set(positions))
        assert after is None or after < positions[0]
        after = positions[-1]
    subject.assert_all(seen, sent)


def test_a_page_goes_on_behind_a_position_whose_message_is_gone(subject):
    """The reader remembers where it was, while a worker settles what it points to."""
    if not subject.can.paged_peek:
        return  # it has no positions to go on from
    queue = subject.queue()
    subject.send(queue, b"a", b"b", b"c", b"d")
    first = subject.peek(queue, limit=2)
    left = bodies(subject.peek(queue, limit=10))[2:]
    receiver = subject.receiver(queue)
    for delivery in subject.take(receiver, 4):
        how = Release() if delivery.envelope.body in left else Complete()
        settle(receiver, how, delivery)
    assert bodies(subject.peek(queue, after=first[-1].position, limit=10)) == left
    subject.send(queue, b"e")  # no later message gets the position of an earlier one
    if subject.counts_on:
        found = bodies(subject.peek(queue, after=first[-1].position, limit=10))
        subject.assert_all(found, [*left, b"e"])


def test_a_remembered_position_of_a_deferred_message_that_is_gone_finds_nothing(subject):
    if not subject.can.defer:
        return
    queue = subject.queue()
    subject.send(queue, b"a")
    receiver = subject.receiver(queue)
    delivery = subject.one(receiver)
    settle(receiver, Defer(), delivery)
    (again,) = receiver.receive_deferred([delivery.position])
    settle(receiver, Complete(), again)
    subject.send(queue, b"b")
    assert receiver.receive_deferred([delivery.position]) == []
    assert bodies(subject.peek(queue)) == [b"b"]


def test_peeking_shows_the_state(subject):
    if not subject.can.paged_peek:
        return
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"leased")
    subject.one(receiver)
    subject.send(queue, b"deferred")
    if subject.can.defer:
        settle(receiver, Defer(), subject.one(receiver))
    subject.send(queue, b"scheduled", delay=60.0)
    subject.send(queue, b"active")
    states = {peeked.envelope.body: peeked for peeked in subject.peek(queue)}
    assert states[b"active"].state is MessageState.ACTIVE
    assert states[b"scheduled"].state is MessageState.SCHEDULED
    assert states[b"scheduled"].due is not None
    if subject.can.defer:
        assert states[b"deferred"].state is MessageState.DEFERRED
    assert states[b"leased"].delivery_count == 1


def test_a_queue_with_sessions_can_be_looked_at_and_its_scheduled_messages_cancelled(subject):
    if not subject.can.sessions:
        return
    queue = subject.queue(sessions=True)
    subject.send(queue, b"now", session="a", message_id="now")
    subject.send(queue, b"later", session="b", message_id="later", delay=600.0)
    states = {peeked.envelope.body: peeked.state for peeked in subject.peek(queue)}
    assert states == {b"now": MessageState.ACTIVE, b"later": MessageState.SCHEDULED}
    assert subject.broker.cancel_scheduled(queue, ["later"]) == 1
    assert bodies(subject.peek(queue)) == [b"now"]
    assert subject.peek(queue, dead_letter=True) == []


@pytest.mark.parametrize("dead_letter", [False, True])
def test_an_empty_queue_has_nothing_to_see(subject, dead_letter):
    queue = subject.queue()
    assert subject.peek(queue, dead_letter=dead_letter) == []
    assert subject.broker.purge(queue, dead_letter=dead_letter) == 0


def test_counts(subject):
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"dead", b"leased", b"deferred")
    dead, _, deferred = subject.take(receiver, 3)
    settle(receiver, DeadLetter("why"), dead)
    if subject.can.defer:
        settle(receiver, Defer(), deferred)
    subject.send(queue, b"1", b"2")
    subject.send(queue, b"later", delay=60.0)
    stats = subject.broker.stats(queue)
    assert stats.queue == queue
    expected = {"active": 2, "leased": 1, "scheduled": 1, "deferred": 1, "dead": 1}
    if not subject.can.defer:
        expected |= {"leased": 2, "deferred": 0}
    if stats.active is not None:
        # a service that does not tell leased or deferred messages apart counts them as active
        expected["active"] += sum(getattr(stats, name) is None for name in ("leased", "deferred"))
    for name, count in expected.items():
        assert getattr(stats, name) in (count, None), name
    assert stats.dead == 1


def test_purging_empties_and_counts(subject):
    queue = subject.queue()
    subject.send(queue, *(b"%d" % number for number in range(40)))
    assert subject.broker.purge(queue) == 40
    subject.assert_nothing(subject.receiver(queue))


def test_purging_removes_what_waits_for_later_too(subject):
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"leased", b"deferred")
    deliveries = {each.envelope.body: each for each in subject.take(receiver, 2)}
    apart = 0
    if subject.can.defer:
        settle(receiver, Defer(), deliveries[b"deferred"])
    else:
        settle(receiver, Complete(), deliveries[b"deferred"])
        apart = 1
    subject.send(queue, b"waiting")
    subject.send(queue, b"later", delay=600.0)
    kept = not subject.can.purges_leased
    assert subject.broker.purge(queue) == 4 - apart - kept
    assert subject.broker.purge(queue) == 0
    subject.pass_time(700.0)
    left = receiver.receive(10, subject.silence)
    assert bodies(left) == ([b"leased"] if kept else [])


def test_purging_a_queue_with_sessions(subject):
    if not subject.can.sessions:
        return
    queue = subject.queue(sessions=True)
    for session in ("a", "b", "c"):
        subject.send(queue, b"1", b"2", session=session)
    subject.send(queue, b"later", session="a", delay=600.0)
    assert subject.broker.purge(queue) == 7
    assert subject.peek(queue) == []


def test_purging_the_dead_letters_leaves_the_living(subject):
    queue = subject.queue()
    receiver = subject.receiver(queue)
    subject.send(queue, b"dead", b"dead too")
    settle(receiver, DeadLetter("why"), *subject.take(receiver, 2))
    subject.send(queue, b"alive")
    assert subject.broker.purge(queue, dead_letter=True) == 2
    assert subject.peek(queue, dead_letter=True) == []
    assert subject.one(receiver).envelope.body == b"alive"
