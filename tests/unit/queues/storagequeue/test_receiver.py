"""A receiver of a Storage queue: what it asks the service for, and what it makes of the answers."""

from __future__ import annotations

import pytest
import queueservice
from queueservice import BUSY, DENIED, LOST, MISSED, UNSENT, Service, Stored
from still import Still

from aztask.errors import (
    AlreadySettled,
    BrokerError,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
    MessageTooLarge,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import ReceiverOptions
from aztask.queues.delivery import Delivery, Lost, Renewed, Settled, Unknown
from aztask.queues.storagequeue.receiver import RECEIVE_LIMIT, Polling, StorageReceiver
from aztask.queues.storagequeue.settling import ENDED, LATE
from aztask.queues.storagequeue.wire import (
    SEND_LIMIT,
    TEXT_LIMIT,
    dead_text_of,
    read_text,
    text_of,
)
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Resubmit, with_envelope
from aztask.support.clock import Clock

NOW = 1000.0
LEASE = 30.0


class Client:
    """Gives the queues of an account, and knows how far its clock is ahead."""

    def __init__(self, time):
        self.time = time
        self.queues = {}
        self.offset = 0.0
        self.learned = []

    def messages(self, name):
        return self.queues.setdefault(name, Service(self.time))

    def learn_time(self, headers):
        self.learned.append(headers)


class AtOnce(queueservice.ThreadPool):
    """Carries out on the caller's thread, unless it is told to wait."""

    waits = False

    def submit(self, call):
        future = super().submit(call)
        if not self.waits:
            self.deliver(len(self.calls) - 1)
        return future


class Bench:
    def __init__(self, **options):
        self.time = Still(NOW)
        self.clock = Clock(self.time.monotonic, self.time.wall, self._sleep)
        self.client = Client(self.time)
        self.thread_pool, self.workers = AtOnce(), AtOnce()
        self.polling = Polling(clock=self.clock, dice=lambda: 0.0)
        self.receiver = StorageReceiver(
            self.client,
            ReceiverOptions("q", **{"lease": LEASE, **options}),
            self.polling,
            clock=self.clock,
            workers=self.workers,
            renewers=self.thread_pool,
        )
        name = "q-poison" if options.get("dead_letter") else "q"
        self.service = self.client.messages(name)

    def _sleep(self, seconds):
        self.time.now += seconds

    def put(self, body=b"x", **written):
        """A message in the queue; its name there."""
        name = f"m-{len(self.service.messages)}"
        text = text_of(Envelope(body), **written)
        self.service.messages[name] = Stored(text, put_at=self.time.now)
        return name

    def take(self, count=1):
        taken = self.receiver.receive(count, 0.0)
        assert len(taken) == count
        return taken


@pytest.fixture
def bench(monkeypatch):
    return made(monkeypatch)


def made(monkeypatch, **options):
    bench = Bench(**options)

    def wait(futures, timeout, return_when):
        if not any(each.done() for each in futures):
            bench.time.now += timeout

    monkeypatch.setattr(queueservice.storage_renewal, "wait", wait)
    return bench


# -- receiving ---------------------------------------------------------------------------------


def test_a_delivery_is_what_the_service_said_under_a_lease_from_before_it_was_asked(bench):
    name = bench.put(b"body")
    bench.service.messages[name].count = 4
    bench.service.takes = 2.0
    (delivery,) = bench.take()
    assert delivery.envelope == Envelope(b"body")
    assert (delivery.queue, delivery.position, delivery.delivery_count) == ("q", name, 5)
    assert (delivery.deadline, delivery.lease_seconds) == (NOW + LEASE, LEASE)
    assert delivery.enqueued_at == NOW
    stored = bench.service.messages[name]
    assert (delivery.token, delivery.text) == (stored.token, stored.text)
    assert (delivery.dead_letter_reason, delivery.dead_letter_description) == (None, None)


@pytest.mark.parametrize(("lease", "hidden"), [(30.0, 30), (0.5, 1), (2.2, 3)])
def test_leases_are_rounded_up_at_the_service_and_not_here(monkeypatch, lease, hidden):
    bench = made(monkeypatch, lease=lease)
    bench.put()
    (delivery,) = bench.take()
    assert bench.service.asked[0][:3] == ("receive", 1, hidden)
    assert delivery.deadline == NOW + lease


@pytest.mark.parametrize(("lease", "seconds"), [(1.0, 2.0), (10.0, 8.0), (300.0, 15.0)])
def test_an_answer_is_waited_for_as_long_as_it_leaves_a_lease(monkeypatch, lease, seconds):
    bench = made(monkeypatch, lease=lease)
    bench.receiver.receive(1, 0.0)
    assert bench.service.asked == [("receive", 1, max(1, int(lease)), seconds)]


def test_another_lease_holds_from_the_next_receive_on(bench):
    bench.put()
    bench.put()
    (first,) = bench.take()
    bench.receiver.set_lease(60.0)
    (second,) = bench.take()
    assert (first.deadline, second.deadline) == (NOW + LEASE, NOW + 60.0)
    assert [each[2] for each in bench.service.asked] == [30, 60]


def test_no_more_are_asked_for_than_the_service_gives_at_once(bench):
    for _ in range(40):
        bench.put()
    assert RECEIVE_LIMIT == 32
    assert len(bench.receiver.receive(40, 0.0)) == 32
    assert len(bench.receiver.receive(3, 0.0)) == 3
    assert [each[1] for each in bench.service.asked] == [32, 3]


def test_without_time_to_wait_it_looks_once_whatever_the_pause(bench):
    for _ in range(3):
        assert bench.receiver.receive(1, 0.0) == []
    assert len(bench.service.asked) == 3


def test_with_time_to_wait_it_looks_until_something_comes(bench, monkeypatch):
    looks = []

    def wait(seconds):
        looks.append(seconds)
        bench.time.now += 0.5
        if len(looks) == 3:
            bench.put()
        return True

    monkeypatch.setattr(bench.polling, "wait", wait)
    assert len(bench.receiver.receive(5, 10.0)) == 1
    assert looks == [10.0, 9.5, 9.0]
    assert len(bench.service.asked) == 3


@pytest.mark.parametrize("seconds", [0.5, 10.0])
def test_when_the_time_is_over_nothing_is_asked(bench, monkeypatch, seconds):
    monkeypatch.setattr(bench.polling, "wait", lambda seconds: False)
    assert bench.receiver.receive(5, seconds) == []
    assert bench.service.asked == []


def test_with_half_a_second_to_wait_it_looks_again(bench, monkeypatch):
    answers = iter([True, True, False])
    monkeypatch.setattr(bench.polling, "wait", lambda seconds: next(answers))
    assert bench.receiver.receive(5, 0.5) == []
    assert len(bench.service.asked) == 2


def test_a_full_batch_is_followed_at_once_and_a_smaller_one_later(bench):
    for _ in range(3):
        bench.put()
    bench.receiver.receive(2, 0.0)
    assert bench.polling.wait(0.0)
    bench.receiver.receive(2, 0.0)
    assert not bench.polling.wait(0.0)


def test_a_closed_receiver_asks_for_nothing(bench):
    bench.receiver.close()
    bench.put()
    assert bench.receiver.receive(1, 0.0) == []
    assert bench.service.asked == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [(UNSENT, BrokerUnavailable), (BUSY, BrokerUnavailable), (DENIED, ConfigurationError)],
)
def test_a_failed_look_says_why(bench, fault, error):
    bench.service.faults.append(fault)
    with pytest.raises(error):
        bench.receiver.receive(1, 0.0)


def test_the_services_time_is_learned_from_every_look(bench):
    bench.service.headers = {"Date": "now"}
    bench.receiver.receive(1, 0.0)
    assert bench.client.learned == [{"Date": "now"}]


def test_a_dead_letter_comes_with_its_reason_and_from_its_own_queue(monkeypatch):
    bench = made(monkeypatch, dead_letter=True)
    text = dead_text_of(Envelope(b"x"), "", DeadLetter("why", "because"))
    bench.service.messages["m-0"] = Stored(text)
    (delivery,) = bench.take()
    assert (delivery.dead_letter_reason, delivery.dead_letter_description) == ("why", "because")
    clone = with_envelope(Resubmit(), Envelope(b"again"), 0.0)
    assert bench.receiver.settle([(delivery, clone)]) == [Settled()]
    (again,) = bench.client.queues["q"].messages.values()
    assert read_text(again.text).envelope.body == b"again"
    assert bench.service.messages == {}


# -- due later ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize(("left", "comes"), [(2.0, True), (2.001, False), (-9.0, True)])
def test_a_message_that_is_due_later_by_the_services_clock_is_hidden_again(
    bench, offset, left, comes
):
    bench.client.offset = offset
    bench.put(due=NOW + offset + left, hidden=2)
    got = bench.receiver.receive(1, 0.0)
    assert bool(got) is comes
    (stored,) = bench.service.messages.values()
    if comes:
        assert len(bench.service.asked) == 1
        assert got[0].delivery_count == 1
    else:
        assert stored.visible_at == NOW + 3.0, "whole seconds, rounded up"
        written = read_text(stored.text)
        assert (written.due, written.hidden) == (NOW + offset + left, 3)


def test_a_delay_that_was_sent_with_the_message_counts_from_when_it_was_put(bench):
    bench.put(delay=100.0)
    assert bench.receiver.receive(1, 0.0) == []
    (stored,) = bench.service.messages.values()
    assert stored.visible_at == NOW + 100.0
    assert read_text(stored.text).delay == 100.0
    bench.time.now = stored.visible_at
    (delivery,) = bench.take()
    assert delivery.enqueued_at == NOW + 100.0
    assert delivery.delivery_count == 1


def test_a_message_of_which_the_service_does_not_say_when_it_was_put_is_due(bench):
    name = bench.put(delay=100.0)
    bench.service.messages[name].put_at = 0.0
    (delivery,) = bench.take()
    assert delivery.enqueued_at == 0.0


def test_a_message_that_grows_somewhat_by_being_hidden_again_still_fits(bench):
    bench.put(b"x" * (SEND_LIMIT // 4 * 3), due=NOW + 50.0, limit=TEXT_LIMIT)
    (stored,) = bench.service.messages.values()
    assert len(stored.text) > SEND_LIMIT
    assert bench.receiver.receive(1, 0.0) == []
    assert stored.visible_at == NOW + 50.0


def test_a_message_with_a_due_time_waits_from_then_on(bench):
    bench.put(due=NOW - 5.0)
    bench.put(due=NOW + 1.0)
    first, second = bench.take(2)
    assert (first.enqueued_at, second.enqueued_at) == (NOW, NOW + 1.0)


def test_among_others_only_what_is_due_is_delivered_and_all_that_was_found_counts(bench):
    bench.put(b"now")
    bench.put(b"later", due=NOW + 50.0)
    (delivery,) = bench.receiver.receive(2, 0.0)
    assert delivery.envelope.body == b"now"
    assert bench.polling.wait(0.0), "the batch was full: look again at once"


@pytest.mark.parametrize("fault", [UNSENT, BUSY, LOST, MISSED])
def test_what_cannot_be_hidden_again_comes_again_after_the_lease(bench, fault):
    bench.put(due=NOW + 50.0)
    bench.service.faults.extend(["ok", fault])
    assert bench.receiver.receive(1, 0.0) == []


def test_hiding_what_another_worker_took_is_no_error_and_a_refused_credential_is(bench):
    bench.put(due=NOW + 50.0)
    bench.service.faults.extend(["ok", queueservice.mismatch()])
    assert bench.receiver.receive(1, 0.0) == []
    bench.time.now += LEASE
    bench.service.faults.extend(["ok", DENIED])
    with pytest.raises(ConfigurationError, match="credential"):
        bench.receiver.receive(1, 0.0)


# -- received and deleted ----------------------------------------------------------------------


def test_received_and_deleted_it_is_gone_and_cannot_be_settled(monkeypatch):
    bench = made(monkeypatch, delete=True)
    bench.put(b"one")
    bench.put(b"two")
    got = bench.take(2)
    assert bench.service.messages == {}
    for delivery in got:
        with pytest.raises(AlreadySettled):
            bench.receiver.settle([(delivery, Complete())])
    assert bench.receiver.receive(1, 0.0) == []


def test_what_could_not_be_deleted_is_not_delivered(monkeypatch):
    bench = made(monkeypatch, delete=True)
    bench.put(b"taken")
    bench.put(b"fine")
    bench.service.faults.extend(["ok", queueservice.mismatch()])
    (delivery,) = bench.receiver.receive(2, 0.0)
    assert delivery.envelope.body == b"fine"


# -- renewing and updating ---------------------------------------------------------------------


def test_a_renewal_lasts_as_long_as_the_receivers_leases_or_as_is_said(bench):
    bench.put()
    (delivery,) = bench.take()
    bench.time.now += 10.0
    assert bench.receiver.renew([delivery]) == [Renewed(NOW + 10.0 + LEASE)]
    assert bench.receiver.renew([delivery], 5.0) == [Renewed(NOW + 15.0)]
    assert bench.receiver.renew([]) == []


def test_renewals_of_a_batch_are_told_apart(bench):
    names = [bench.put() for _ in range(3)]
    taken = bench.take(3)
    bench.service.messages[names[1]].token = "another worker's"
    first, second, third = bench.receiver.renew(taken)
    assert isinstance(first, Renewed)
    assert isinstance(second, Lost)
    assert isinstance(third, Renewed)


def test_an_update_replaces_content_and_token_and_renews(bench):
    name = bench.put(b"old")
    (delivery,) = bench.take()
    bench.time.now += 10.0
    new = Envelope(b"new")
    assert bench.receiver.update(delivery, new) == Renewed(NOW + 10.0 + LEASE)
    stored = bench.service.messages[name]
    assert read_text(stored.text).envelope == new
    assert (delivery.envelope, delivery.text, delivery.token) == (new, stored.text, stored.token)
    assert (delivery.deadline, delivery.lease_seconds) == (NOW + 10.0 + LEASE, LEASE)
    assert stored.visible_at == delivery.deadline
    assert bench.receiver.settle([(delivery, Complete())]) == [Settled()]


@pytest.mark.parametrize(("renewed", "lease"), [(60.0, 60.0), (5.0, LEASE)])
def test_an_update_grants_what_the_lease_was_extended_to(bench, renewed, lease):
    bench.put()
    (delivery,) = bench.take()
    bench.receiver.renew([delivery], renewed)
    bench.receiver.update(delivery, Envelope(b"new"))
    assert (delivery.deadline, delivery.lease_seconds) == (NOW + lease, lease)


@pytest.mark.parametrize(
    ("fault", "untouched"), [(LOST, False), (MISSED, False), (UNSENT, True), (DENIED, True)]
)
def test_an_update_without_success_leaves_the_delivery_as_it_was(bench, fault, untouched):
    bench.put(b"old")
    (delivery,) = bench.take()
    before = (delivery.envelope, delivery.text, delivery.token, delivery.deadline)
    bench.service.faults.append(fault)
    answer = bench.receiver.update(delivery, Envelope(b"new"))
    assert isinstance(answer, Unknown)
    assert answer.untouched is untouched
    assert answer.reason
    assert (delivery.envelope, delivery.text, delivery.token, delivery.deadline) == before


def test_an_update_of_what_another_worker_took_is_a_loss(bench):
    name = bench.put()
    (delivery,) = bench.take()
    bench.service.messages[name].token = "another worker's"
    answer = bench.receiver.update(delivery, Envelope(b"new"))
    assert isinstance(answer, Lost)
    assert "PopReceiptMismatch" in answer.reason


@pytest.mark.parametrize(("left", "sent"), [(0.001, True), (0.0, False)])
def test_from_the_deadline_on_nothing_is_updated(bench, left, sent):
    bench.put()
    (delivery,) = bench.take()
    bench.time.now = delivery.deadline - left
    answer = bench.receiver.update(delivery, Envelope(b"new"))
    assert (answer == ENDED) is not sent
    assert len(bench.service.asked) == (2 if sent else 1)


def test_an_update_waits_for_the_token_of_a_renewal_under_way(bench):
    bench.put()
    (delivery,) = bench.take()
    bench.thread_pool.waits = True
    assert bench.receiver.renew([delivery]) == [LATE]
    assert bench.receiver.update(delivery, Envelope(b"new")) == LATE
    assert bench.time.now == NOW + LEASE
    bench.thread_pool.deliver(0)
    bench.time.now = NOW + 2.0
    answer = bench.receiver.update(delivery, Envelope(b"new"))
    assert isinstance(answer, Renewed)
    bench.thread_pool.waits = False
    late = bench.thread_pool
    bench.service.faults.append(LOST)
    late.waits = True
    bench.receiver.renew([delivery])
    late.deliver(1)
    answer = bench.receiver.update(delivery, Envelope(b"newer"))
    assert isinstance(answer, Unknown)
    assert not answer.untouched


def test_an_update_may_be_somewhat_larger_than_what_is_sent(bench):
    bench.put()
    (delivery,) = bench.take()
    envelope = Envelope(b"x" * (SEND_LIMIT // 4 * 3))
    assert isinstance(bench.receiver.update(delivery, envelope), Renewed)


def test_what_is_too_large_is_not_sent(bench):
    bench.put()
    (delivery,) = bench.take()
    with pytest.raises(MessageTooLarge):
        bench.receiver.update(delivery, Envelope(b"x" * 200_000))
    assert len(bench.service.asked) == 1


# -- settling ----------------------------------------------------------------------------------


def test_one_settlement_and_a_mixed_batch(bench):
    names = [bench.put(b"%d" % n) for n in range(5)]
    taken = bench.take(5)
    bench.service.messages[names[1]].token = "another worker's"
    answers = bench.receiver.settle(
        [
            (taken[0], Complete()),
            (taken[1], Complete()),
            (taken[2], DeadLetter("first", "a")),
            (taken[3], DeadLetter("second", "b")),
            (taken[4], Abandon()),
        ]
    )
    assert [type(each) for each in answers] == [Settled, Lost, Settled, Settled, Settled]
    assert list(bench.service.messages) == [names[1], names[4]]
    dead = [read_text(each.text) for each in bench.client.queues["q-poison"].messages.values()]
    assert [(each.envelope.body, each.dead) for each in dead] == [
        (b"2", DeadLetter("first", "a")),
        (b"3", DeadLetter("second", "b")),
    ]
    assert [each.settled for each in taken] == [True, False, True, True, True]


def test_a_resubmission_changes_the_message_where_it_lies(bench):
    name = bench.put()
    (delivery,) = bench.take()
    clone = with_envelope(Resubmit(5.0), Envelope(b"clone"), 5.0)
    assert bench.receiver.settle([(delivery, clone)]) == [Settled()]
    assert list(bench.service.messages) == [name]
    assert bench.service.messages[name].visible_at == NOW + 5.0


def test_a_settlement_without_an_answer_can_be_tried_again(bench):
    bench.put()
    (delivery,) = bench.take()
    bench.service.faults.append(DENIED)
    assert isinstance(bench.receiver.settle([(delivery, Complete())])[0], Unknown)
    assert bench.receiver.settle([(delivery, Complete())]) == [Settled()]
    with pytest.raises(AlreadySettled):
        bench.receiver.settle([(delivery, Complete())])


def test_a_batch_with_a_settlement_that_cannot_be_is_refused_as_a_whole(bench):
    bench.put()
    bench.put()
    first, second = bench.take(2)
    for wrong in (Defer(), Resubmit()):
        with pytest.raises((CapabilityError, ConfigurationError)):
            bench.receiver.settle([(first, Complete()), (second, wrong)])
    assert len(bench.service.messages) == 2


def test_while_a_renewal_is_pending_a_batch_leaves_that_member_alone(bench):
    names = [bench.put() for _ in range(3)]
    taken = bench.take(3)
    bench.thread_pool.waits = True
    assert bench.receiver.renew([taken[1]]) == [LATE]
    bench.thread_pool.carry_out(0)  # the token has changed; nobody here knows the new one
    answers = bench.receiver.settle([(each, Complete()) for each in taken])
    assert answers == [Settled(), LATE, Settled()]
    assert list(bench.service.messages) == [names[1]]
    assert [each for each in bench.service.asked if each[0] == "delete"][-1][1] == names[2]
    bench.thread_pool.deliver(0)
    bench.time.now = NOW + 5.0
    assert bench.receiver.settle([(taken[1], Complete())]) == [Settled()]


def test_deliveries_of_another_broker_are_refused(bench):
    foreign = Delivery("q", Envelope(b""), 1, "t", 1, 0.0, NOW + 9.0, 9.0)
    for use in (
        lambda: bench.receiver.settle([(foreign, Complete())]),
        lambda: bench.receiver.renew([foreign]),
        lambda: bench.receiver.update(foreign, Envelope(b"")),
    ):
        with pytest.raises(ConfigurationError, match="another broker"):
            use()


def test_there_is_nothing_deferred_here(bench):
    with pytest.raises(CapabilityError, match="cannot defer"):
        bench.receiver.receive_deferred(["m-0"])


def test_an_odd_refusal_is_a_brokers_error(bench):
    bench.service.faults.append(queueservice.refused(400, "InvalidInput"))
    with pytest.raises(BrokerError, match="InvalidInput"):
        bench.receiver.receive(1, 0.0)
