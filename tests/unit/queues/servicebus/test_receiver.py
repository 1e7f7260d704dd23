"""The receiver: deadlines, credit, renewals and settlements, whatever the service answers."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusServerBusyError
from busservice import LEASE, Answer, BusService, broken, finish, install
from waiting import wait_until

from aztask.errors import (
    AlreadySettled,
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
    LeaseRefused,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import ReceiverOptions
from aztask.queues.delivery import Delivery, Lost, Renewed, Settled, Unknown
from aztask.queues.servicebus import receiver as module
from aztask.queues.servicebus.receiver import BusReceiver, request_seconds
from aztask.queues.servicebus.wire import BusDelivery
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit, Settlement
from aztask.support.failpoint import hit

Make = Callable[..., BusReceiver]

SHORTEST_WAIT, QUIET_SECONDS, OPEN_SECONDS = 0.1, 60.0, 10.0


class Watch:
    """Records what a receiver tells its `LockWatch`. refusal: why the lease is not the lock."""

    def __init__(self) -> None:
        self.refusal = ""
        self.after_messages = ""
        self.noted: list[tuple[int, float, float]] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def try_again(self) -> None:
        self.calls.append("try again")

    def messages(self, messages: Any, received_at: float, asked_at: float) -> None:
        self.noted.append((len(messages), received_at, asked_at))

    def verdict(self) -> str:
        self.refusal = self.after_messages
        return self.refusal

    def error(self) -> LeaseRefused:
        return LeaseRefused(self.refusal)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> BusService:
    return install(monkeypatch)


@pytest.fixture
def make(service: BusService) -> Iterator[Make]:
    made = []

    def make(*, lease: float = LEASE, **options: Any) -> BusReceiver:
        def send(queue: str, envelopes: Any) -> None:
            service.requests.append(("send", queue, tuple(envelopes)))
            service.answer("send", service.links[0])

        watch = options.pop("watch", None)
        terms = ReceiverOptions("q", lease, **options)
        one = BusReceiver(service.client, terms, send, clock=service.clock, watch=watch)
        made.append(one)
        return one

    yield make
    for each in made:
        finish(each)


def received(service: BusService, receiver: BusReceiver, count: int = 1) -> list[Delivery]:
    service.bring(count)
    deliveries = receiver.receive(count, 1.0)
    assert len(deliveries) == count
    return deliveries


def leased(service: BusService, count: int) -> list[BusDelivery]:
    """Deliveries that are locked, without a receive."""
    made = []
    for number in range(count):
        token = uuid.uuid4()
        service.locked.add(token)
        message: Any = object()
        made.append(
            BusDelivery(
                "q", Envelope(b""), number, str(token), 1, 0.0, service.time.now + LEASE, LEASE,
                lock=token, message=message,
            )
        )  # fmt: skip
    return made


def settle(receiver: BusReceiver, deliveries: list[Any], how: Settlement) -> list[Any]:
    return receiver.settle([(each, how) for each in deliveries])


# -- receiving ---------------------------------------------------------------------------------


def test_a_deadline_is_a_lease_after_the_credit_was_given(service, make) -> None:
    """Neither more nor less, however long the messages took to come."""
    receiver = make()
    service.on_pull = lambda stop: service.time.sleep(2.0)
    for pause in (0.0, 7.0):
        service.time.now += pause
        asked_at = service.time.now
        (delivery,) = received(service, receiver)
        assert service.time.now == asked_at + 2.0
        assert (delivery.deadline, delivery.lease_seconds) == (asked_at + LEASE, LEASE)


def test_a_delivery_is_what_the_service_sent(service, make) -> None:
    (delivery,) = received(service, make())
    assert (delivery.queue, delivery.position, delivery.delivery_count) == ("q", 1, 1)
    assert delivery.envelope.body == b"body"
    assert (delivery.settled, delivery.attempted) == (False, False)


def test_credit_is_given_anew_after_a_tenth_of_a_lease(service, make) -> None:
    """So the deadline of what comes late is not much too early."""
    receiver = make()
    service.arriving.extend([[], [], [service.message()]])
    began = service.time.now
    (delivery,) = receiver.receive(5, 20.0)
    assert [(limit, wait) for _, limit, wait in service.pulls] == [(5, 6.0)] * 3
    assert delivery.deadline == began + 12.0 + LEASE


@pytest.mark.parametrize(
    ("lease", "wait", "waits"),
    [
        (60.0, 15.0, [6.0, 6.0, 3.0]),
        (60.0, 2.0, [2.0]),
        (60.0, 0.0, [SHORTEST_WAIT]),
        (5.0, 1.2, [0.5, 0.5, 0.2]),
        (0.5, 0.3, [SHORTEST_WAIT] * 3),
    ],
)
def test_a_receive_without_messages_ends_when_its_time_is_over(
    service, make, lease, wait, waits
) -> None:
    service.time.now = 0.0
    assert make(lease=lease).receive(1, wait) == []
    assert [each for _, _, each in service.pulls] == pytest.approx(waits)
    assert service.time.now == pytest.approx(max(wait, SHORTEST_WAIT))


def test_a_receive_of_nothing_asks_for_nothing(service, make) -> None:
    assert make().receive(0, 5.0) == []
    assert service.pulls == []


def test_a_connection_that_breaks_is_given_up_and_the_next_receive_opens_another(
    service, make
) -> None:
    receiver = make()
    service.fail("pull", broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    assert service.dropped == [service.pulls[0][0]]
    received(service, receiver)
    assert service.pulls[1][0] is not service.pulls[0][0]


def test_a_connection_that_cannot_even_be_made(service, make) -> None:
    receiver = make()
    service.fail("connect", OSError("no such host"))
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    received(service, receiver)


def test_a_receive_that_meets_a_closed_receiver_opens_nothing(service, make) -> None:
    receiver = make()
    receiver._closed = True  # by another thread, while this one waited for the link
    with pytest.raises(BrokerUnavailable, match="closed"):
        receiver._connected()
    assert service.links == []


def test_a_connection_that_cannot_be_opened_is_given_up_too(service, make) -> None:
    receiver = make(delete=True)
    service.fail("open", broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    assert len(service.dropped) == 1
    assert service.requests[0] == ("open", OPEN_SECONDS)


def test_one_connection_receives_as_long_as_it_is_open(service, make) -> None:
    receiver = make(delete=True)
    service.bring()
    receiver.receive(1, 1.0)
    service.bring()
    receiver.receive(1, 1.0)
    assert [link.options for link in service.links] == [
        {"queue": "q", "dead_letter": False, "delete": True}
    ]
    assert service.kinds() == ["open"]
    service.links[0]._running = False  # the SDK closed it
    service.bring()
    receiver.receive(1, 1.0)
    assert service.kinds() == ["open", "open"]


def test_the_control_connections_are_opened_beside_the_first(service, make) -> None:
    """So the first renewal does not wait for its connection; renewals and settlements have one
    each, and neither is the one that receives.
    """
    receiver = make(dead_letter=True)
    (delivery,) = received(service, receiver)
    wait_until(lambda: service.kinds().count("open") == 3, 10.0, "all connections are open")
    assert len(service.links) == 3
    assert service.kinds().count("open") == 3
    assert [link.options["dead_letter"] for link in service.links] == [True] * 3
    timed = [link.options.get("request_seconds") for link in service.links]
    assert sorted(timed, key=str) == [request_seconds(LEASE)] * 2 + [None]
    receiver.renew([delivery])
    settle(receiver, [delivery], Complete())
    assert service.kinds().count("open") == 3


def test_they_are_opened_side_by_side_the_first_time(service, make, monkeypatch) -> None:
    """The SDK takes half a second for each; later ones are opened once the link is there again."""
    receiver = make()
    opened: list[int] = []
    monkeypatch.setattr(receiver, "_warm", lambda: opened.append(service.kinds().count("open")))
    received(service, receiver)
    assert opened == [0, 1]
    for link in service.links:
        link._running = False
    received(service, receiver)
    assert opened == [0, 1, 2]


def test_what_is_deleted_as_it_is_received_needs_no_control_connection(service, make) -> None:
    receiver = make(delete=True)
    (delivery,) = received(service, receiver)
    assert delivery.settled
    assert len(service.links) == 1
    assert (receiver._settling._thread, receiver._renewing._thread) == (None, None)
    with pytest.raises(AlreadySettled):
        settle(receiver, [delivery], Complete())
    with pytest.raises(AlreadySettled):
        receiver.renew([delivery])


@pytest.mark.parametrize(("silent", "peeks"), [(QUIET_SECONDS, 0), (QUIET_SECONDS + 0.1, 1)])
def test_a_connection_that_was_quiet_for_long_is_tried_out(service, make, silent, peeks) -> None:
    receiver = make()
    received(service, receiver)
    link = service.pulls[0][0]
    service.time.now += silent
    received(service, receiver)
    assert link.peeked == [
        {"max_message_count": 1, "timeout": request_seconds(LEASE)} for _ in range(peeks)
    ]
    service.time.now += QUIET_SECONDS
    received(service, receiver)
    assert len(link.peeked) == peeks, "messages came, and what was tried out has answered"


def test_a_receive_that_waits_for_long_tries_its_connection_out(service, make) -> None:
    receiver = make()
    service.time.now = 0.0
    receiver.receive(1, 150.0)
    assert len(service.pulls[0][0].peeked) == 2


def test_what_was_tried_out_is_not_tried_again_before_its_time(service, make) -> None:
    receiver = make()
    received(service, receiver)
    service.time.now += QUIET_SECONDS + 1.0
    receiver.receive(1, 0.0)
    receiver.receive(1, 0.0)
    assert len(service.pulls[0][0].peeked) == 1


def test_a_new_connection_is_not_quiet(service, make) -> None:
    receiver = make()
    received(service, receiver)
    service.time.now += 10 * QUIET_SECONDS
    service.pulls[0][0]._running = False
    received(service, receiver)
    assert service.pulls[0][0].peeked == []


def test_a_silently_dropped_connection_is_found(service, make) -> None:
    receiver = make()
    received(service, receiver)
    service.time.now += QUIET_SECONDS + 1.0
    service.fail("peek", broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    received(service, receiver)


def test_setting_the_lease_changes_nothing(service, make) -> None:
    receiver = make()
    receiver.set_lease(5.0)
    (delivery,) = received(service, receiver)
    assert delivery.lease_seconds == LEASE


@pytest.mark.parametrize(
    ("lease", "seconds"), [(1.0, 1.0), (12.5, 1.0), (50.0, 4.0), (125.0, 10.0), (300.0, 10.0)]
)
def test_a_request_may_take_a_part_of_the_lease(lease, seconds) -> None:
    assert request_seconds(lease) == seconds


# -- the lock ----------------------------------------------------------------------------------


def test_the_first_pull_of_a_connection_tells_when_its_messages_were_locked(service, make) -> None:
    """Of later ones nothing is known: they may have been on their way since an earlier pull."""
    watch = Watch()
    receiver = make(watch=watch)
    received(service, receiver, 2)
    asked_at = service.time.now
    service.time.now += 1.0
    received(service, receiver)
    assert watch.noted == [(2, asked_at, asked_at), (1, asked_at + 1.0, -math.inf)]
    assert watch.calls == ["start", "start"]
    service.fail("pull", broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    received(service, receiver)
    assert watch.noted[-1] == (1, service.time.now, service.time.now)


def test_a_pull_without_messages_is_a_first_pull_too(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    service.arriving.extend([[], [service.message()]])
    receiver.receive(1, 20.0)
    assert [asked_at for _, _, asked_at in watch.noted] == [-math.inf]


def test_messages_under_a_lease_that_is_not_the_lock_are_given_back_uncounted(
    service, make
) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    watch.after_messages = "the lock is 30 s"
    messages = service.bring(3)
    with pytest.raises(ConfigurationError, match="the lock is 30 s"):
        receiver.receive(3, 1.0)
    assert service.releases == [each.lock_token for each in messages]
    link = service.pulls[0][0]
    assert link in service.closed
    assert "abandon" not in service.kinds()
    # the next receive takes a single message, over a new connection, and looks again
    service.bring()
    with pytest.raises(ConfigurationError):
        receiver.receive(3, 1.0)
    assert watch.calls == ["start", "try again"]
    assert service.pulls[1][0] is not link
    assert service.pulls[1][1] == 1
    assert watch.noted[1][2] == service.time.now, "a first pull again"


def test_a_refused_lease_stays_refused_where_no_message_shows_otherwise(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    watch.refusal = "the lock is 30 s"
    with pytest.raises(ConfigurationError, match="30 s"):
        receiver.receive(3, 1.0)
    assert service.pulls, "it was looked for one"
    watch.try_again = lambda: setattr(watch, "refusal", "")
    assert receiver.receive(3, 1.0) == []


def test_a_refusal_that_is_found_meanwhile_is_told_at_the_next_receive(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    service.on_pull = lambda stop: setattr(watch, "refusal", "the lock is 30 s")
    assert receiver.receive(1, 0.0) == []
    with pytest.raises(ConfigurationError):
        receiver.receive(1, 0.0)


def test_a_refusal_while_another_thread_closes_the_receiver(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    watch.after_messages = "the lock is 30 s"
    watch.verdict = lambda: receiver.close() or Watch.verdict(watch)
    service.bring()
    with pytest.raises(ConfigurationError, match="30 s"):
        receiver.receive(1, 0.0)
    assert service.releases == []


def test_deferred_messages_teach_how_long_the_lock_is(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    service.deferred[7] = service.message()
    asked_at = service.time.now
    service.request_takes = 1.0
    receiver.receive_deferred([7])
    assert watch.noted == [(1, service.time.now, asked_at)]


# -- deferred ----------------------------------------------------------------------------------


def test_deferred_messages_are_received_together(service, make) -> None:
    receiver = make()
    for number in (5, 7):
        service.deferred[number] = service.message()
    service.request_takes = 1.0
    asked_at = service.time.now
    found = receiver.receive_deferred([5, 7])
    assert [each.deadline for each in found] == [asked_at + LEASE] * 2
    assert ("deferred", (5, 7)) in service.requests
    settle(receiver, found, Complete())
    assert service.locked == set()


def test_of_deferred_messages_those_that_are_gone_are_left_out(service, make) -> None:
    receiver = make()
    service.deferred[7] = service.message()
    (found,) = receiver.receive_deferred([5, 7, 9])
    assert found.envelope.message_id == "m1"
    asked = [each[1] for each in service.requests if each[0] == "deferred"]
    assert asked == [(5, 7, 9), (5,), (7,), (9,)]
    assert receiver.receive_deferred([5]) == []


def test_no_deferred_messages_cost_no_request(service, make) -> None:
    assert make().receive_deferred([]) == []
    assert service.requests == []


def test_deferred_messages_of_a_service_that_is_unreachable(service, make) -> None:
    service.fail("deferred", broken(), broken())
    with pytest.raises(BrokerUnavailable):
        make().receive_deferred([5])


# -- renewals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [None, 5.0, 300.0])
def test_a_renewed_deadline_is_a_lease_after_the_request(service, make, seconds) -> None:
    """The queue alone says how long: neither a shorter nor a longer wish changes it."""
    receiver = make()
    deliveries = received(service, receiver, 3)
    for each in deliveries:
        each.lease_seconds = 1.0
    service.time.now += 40.0
    service.request_takes = 3.0
    asked_at = service.time.now
    answers = receiver.renew(deliveries, seconds)
    assert answers == [Renewed(asked_at + LEASE)] * 3
    assert [each.deadline for each in deliveries] == [asked_at + LEASE] * 3
    assert [each.lease_seconds for each in deliveries] == [LEASE] * 3
    (request,) = [each for each in service.requests if each[0] == "renew"]
    assert len(request[1]) == 3
    assert request[2] == request_seconds(LEASE)


def test_a_lost_lease_among_many_is_found_and_the_others_are_renewed(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 5)
    before = deliveries[2].deadline
    service.locked.discard(deliveries[2].lock)
    service.time.now += 40.0
    answers = receiver.renew(deliveries)
    assert [type(each) for each in answers] == [Renewed, Renewed, Lost, Renewed, Renewed]
    assert deliveries[2].deadline == before


def test_a_renewal_without_an_answer_leaves_the_deadline(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    before = delivery.deadline
    service.time.now += 40.0
    service.fail("renew", Answer(broken(), done=True), Answer(broken(), done=True))
    assert [type(each) for each in receiver.renew([delivery])] == [Unknown]
    assert delivery.deadline == before
    assert not delivery.attempted, "only a settlement can have settled it"


def test_renewing_nothing_asks_for_nothing(service, make) -> None:
    assert make().renew([]) == []
    assert service.requests == []


def test_there_is_no_update_here(service, make) -> None:
    with pytest.raises(CapabilityError, match="result store"):
        make().update(leased(service, 1)[0], Envelope(b""))


# -- settling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "request_"),
    [
        (Complete(), ("complete", "", "")),
        (Abandon(), ("abandon", "", "")),
        (Defer(), ("defer", "", "")),
        (DeadLetter("why", "how"), ("dead-letter", "why", "how")),
    ],
)
def test_a_settlement_is_one_request_for_all(service, make, how, request_) -> None:
    receiver = make()
    deliveries = received(service, receiver, 3)
    assert settle(receiver, deliveries, how) == [Settled()] * 3
    (made,) = [each for each in service.requests if each[0] == request_[0]]
    assert (made[0], *made[2:]) == request_
    assert set(made[1]) == {each.lock for each in deliveries}
    assert all(each.settled for each in deliveries)
    with pytest.raises(AlreadySettled):
        settle(receiver, deliveries[:1], how)


def test_in_a_batch_each_dead_letter_has_its_own_reason(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 6)
    hows = [
        DeadLetter("a", "1"), Complete(), DeadLetter("b", "2"),
        DeadLetter("a", "2"), Abandon(), DeadLetter("a", "1"),
    ]  # fmt: skip
    pairs = list(zip(deliveries, hows, strict=True))
    assert receiver.settle(pairs) == [Settled()] * 6
    got = {
        token: (verb, reason, text)
        for verb, tokens, reason, text in (r for r in service.requests if len(r) == 4)
        for token in tokens
    }
    assert [got[each.lock] for each in deliveries] == [
        ("dead-letter", "a", "1"),
        ("complete", "", ""),
        ("dead-letter", "b", "2"),
        ("dead-letter", "a", "2"),
        ("abandon", "", ""),
        ("dead-letter", "a", "1"),
    ]


def test_a_stale_member_of_a_batch_harms_no_other(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 7)
    service.locked.discard(deliveries[4].lock)
    answers = settle(receiver, deliveries, Complete())
    assert [isinstance(each, Settled) for each in answers] == [n != 4 for n in range(7)]
    assert isinstance(answers[4], Lost)
    assert [each.settled for each in deliveries] == [n != 4 for n in range(7)]
    assert service.locked == set()


def test_twenty_thousand_settle_in_requests_of_two_hundred(service, make) -> None:
    receiver = make()
    deliveries = leased(service, 20_000)
    service.locked.discard(deliveries[12_345].lock)
    answers = settle(receiver, deliveries, Complete())
    assert sum(isinstance(each, Settled) for each in answers) == 19_999
    assert isinstance(answers[12_345], Lost)
    sizes = [len(each[1]) for each in service.requests if each[0] == "complete"]
    assert max(sizes) == 200
    assert len(sizes) < 120
    assert service.locked == set()


def test_a_delivery_of_another_broker_is_refused(service, make) -> None:
    foreign = Delivery("q", Envelope(b""), 1, "t", 1, 0.0, 0.0, LEASE)
    with pytest.raises(ConfigurationError, match="another broker"):
        settle(make(), [foreign], Complete())


@pytest.mark.parametrize("missing", ["lock", "message"])
def test_a_delivery_without_a_lock_is_refused(service, make, missing) -> None:
    (delivery,) = leased(service, 1)
    setattr(delivery, missing, None)
    with pytest.raises(ConfigurationError, match="received and deleted"):
        settle(make(), [delivery], Complete())


def test_settling_nothing_asks_for_nothing(service, make) -> None:
    receiver = make()
    assert receiver.settle([]) == []
    assert service.requests == []
    assert receiver._settling._thread is None


# -- resubmissions -----------------------------------------------------------------------------


def test_a_clone_is_sent_with_its_delay_before_its_original_is_completed(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 3)
    hows = [
        Resubmit(5.0, envelope=Envelope(b"a")),
        Complete(),
        Resubmit(7.0, envelope=Envelope(b"b", delay=1.0)),
    ]
    assert receiver.settle(list(zip(deliveries, hows, strict=True))) == [Settled()] * 3
    settling = [each for each in service.requests if each[0] in ("send", "complete")]
    assert [each[0] for each in settling] == ["send", "complete"]
    assert settling[0][1:] == ("q", (Envelope(b"a", delay=5.0), Envelope(b"b", delay=7.0)))
    assert len(settling[1][1]) == 3


def test_an_original_whose_clone_could_not_be_sent_is_not_completed(service, make) -> None:
    """The send fails and the settlement would work: it must not, or the retry would be lost."""
    receiver = make()
    deliveries = received(service, receiver, 3)
    service.fail("send", BrokerUnavailable("no way out"))
    hows = [Complete(), Resubmit(5.0, envelope=Envelope(b"a")), DeadLetter("why")]
    pairs = list(zip(deliveries, hows, strict=True))
    assert receiver.settle(pairs) == [Settled(), Unknown("no way out"), Settled()]
    assert service.locked == {deliveries[1].lock}, "it is held, and comes again"
    assert [each.settled for each in deliveries] == [True, False, True]
    assert not deliveries[1].attempted
    assert receiver.settle([pairs[1]]) == [Settled()], "and it can be tried again"
    assert service.locked == set()


def test_a_resubmission_without_its_clone_is_refused_before_anything_happens(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 2)
    pairs = list(zip(deliveries, [Complete(), Resubmit(5.0)], strict=True))
    with pytest.raises(ConfigurationError, match="with_envelope"):
        receiver.settle(pairs)
    assert len(service.locked) == 2
    assert "complete" not in service.kinds()


def test_where_nothing_is_resubmitted_nothing_is_sent(service, make) -> None:
    receiver = make()
    settle(receiver, received(service, receiver), Complete())
    assert "send" not in service.kinds()


# -- settlements without an answer -------------------------------------------------------------


def test_a_settlement_that_was_done_and_not_answered_counts_as_done(service, make) -> None:
    """It is repeated, and refused; until our deadline no other receiver can hold the lock."""
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", Answer(broken(), done=True))
    assert settle(receiver, [delivery], Complete()) == [Settled()]
    assert delivery.settled


@pytest.mark.parametrize(("left", "verdict"), [(0.001, Settled), (0.0, Lost), (-1.0, Lost)])
def test_after_the_deadline_a_refusal_may_be_anothers(service, make, left, verdict) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    delivery.attempted = True
    service.locked.clear()
    service.time.now = delivery.deadline - left
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [verdict]
    assert delivery.settled is (verdict is Settled)


def test_that_a_try_got_no_answer_is_remembered_until_the_next_one(service, make) -> None:
    receiver = make()
    first, second = received(service, receiver, 2)
    service.fail("settle", Answer(broken()), Answer(broken(), done=True))
    assert [type(each) for each in settle(receiver, [first], Complete())] == [Unknown]
    assert (first.attempted, first.settled) == (True, False)
    assert first.lock not in service.locked
    assert settle(receiver, [first], Complete()) == [Settled()]
    service.locked.discard(second.lock)
    assert [type(each) for each in settle(receiver, [second], Complete())] == [Lost]


def test_a_busy_service_has_done_nothing(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", ServiceBusServerBusyError(message="slow down"))
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Unknown]
    assert (delivery.attempted, delivery.settled) == (False, False)


def test_what_may_have_been_settled_is_not_said_to_be_lost_by_a_renewal(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", Answer(broken()), Answer(broken(), done=True))
    settle(receiver, [delivery], Complete())
    assert [type(each) for each in receiver.renew([delivery])] == [Unknown]
    service.locked.add(delivery.lock)
    service.fail("renew", ServiceBusServerBusyError(message="slow down"))
    (answer,) = receiver.renew([delivery])
    assert "slow down" in answer.reason
    service.locked.clear()
    service.time.now = delivery.deadline
    assert [type(each) for each in receiver.renew([delivery])] == [Lost]


# -- what the receiving link is told -----------------------------------------------------------


def test_the_link_learns_at_the_next_pull_what_was_settled_elsewhere(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 4)
    link = service.pulls[0][0]
    settle(receiver, deliveries[:2], Complete())
    service.locked.discard(deliveries[2].lock)
    settle(receiver, [deliveries[2]], Complete())  # lost: over as well
    service.fail("settle", broken(), broken())
    settle(receiver, [deliveries[3]], Complete())  # unknown: not over
    assert link.forgotten == []
    receiver.receive(1, 0.0)
    assert link.forgotten == [(n, str(n).encode()) for n in (1, 2, 3)]
    receiver.receive(1, 0.0)
    assert len(link.forgotten) == 3, "once"


def test_what_came_over_no_link_is_not_told_of(service, make) -> None:
    receiver = make()
    assert settle(receiver, leased(service, 1), Complete()) == [Settled()]
    receiver.receive(1, 0.0)
    assert service.pulls[0][0].forgotten == []


# -- giving back -------------------------------------------------------------------------------


def test_a_release_goes_back_uncounted_over_its_own_link(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 3)
    hows = [Release(), Complete(), Release()]
    assert receiver.settle(list(zip(deliveries, hows, strict=True))) == [Settled()] * 3
    assert service.releases == [deliveries[0].lock, deliveries[2].lock]
    assert "abandon" not in service.kinds()
    assert all(each.settled for each in deliveries)
    assert receiver._releasing is False
    receiver.receive(1, 0.0)  # the connection is free again


def test_what_came_over_another_link_is_abandoned(service, make) -> None:
    receiver = make()
    (first,) = received(service, receiver)
    service.fail("pull", broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 1.0)
    assert settle(receiver, [first], Release()) == [Settled()], "without a link"
    (second,) = received(service, receiver)
    service.pulls[-1][0].owned.clear()
    assert settle(receiver, [second], Release()) == [Settled()], "by another link"
    assert service.releases == []
    assert service.kinds().count("abandon") == 2


def test_what_a_busy_link_cannot_release_is_abandoned(service, make, monkeypatch) -> None:
    monkeypatch.setattr(module, "RELEASE_SECONDS", 0.01)
    receiver = make()
    (delivery,) = received(service, receiver)
    with receiver._link_lock:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.extend(settle(receiver, [delivery], Release()))
        )
        thread.start()
        thread.join()
    assert answers == [Settled()]
    assert service.releases == []
    assert receiver._releasing is False
    assert "abandon" in service.kinds()


def test_a_receive_that_waits_makes_way_for_a_release(service, make, monkeypatch) -> None:
    monkeypatch.setattr(module, "RELEASE_SECONDS", 10.0)
    receiver = make()
    (delivery,) = received(service, receiver)
    waiting, done = threading.Event(), threading.Event()

    def wait_until_asked(stop: Callable[[], bool]) -> None:
        waiting.set()
        while not (stop() or done.is_set()):
            pass

    service.on_pull = wait_until_asked
    thread = threading.Thread(target=lambda: receiver.receive(1, 1000.0))
    thread.start()
    assert waiting.wait(10.0)
    answers = settle(receiver, [delivery], Release())
    done.set()
    thread.join(10.0)
    assert answers == [Settled()]
    assert service.releases == [delivery.lock]


def test_after_it_made_way_a_receive_pauses_before_it_goes_on(service, make) -> None:
    receiver = make()
    receiver._releasing = True
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        receiver._releasing = False

    service.time.sleep = sleep
    receiver.receive(1, 20.0)
    assert pauses == [0.01]


def test_other_settlements_do_not_wait_for_the_receiving_link(service, make, monkeypatch) -> None:
    monkeypatch.setattr(module, "RELEASE_SECONDS", 30.0)
    receiver = make()
    (delivery,) = received(service, receiver)
    with receiver._link_lock:
        thread = threading.Thread(target=lambda: settle(receiver, [delivery], Complete()))
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
    assert delivery.settled


# -- the end -----------------------------------------------------------------------------------


def test_closing_ends_all_connections_and_the_watch(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    (delivery,) = received(service, receiver)
    receiver._settling.call(lambda link: None)
    receiver._renewing.call(lambda link: None)
    threads = [receiver._settling._thread, receiver._renewing._thread]
    receiver.close()
    for thread in threads:
        thread.join(10.0)
    assert sorted(map(id, service.closed)) == sorted(map(id, service.links))
    assert "close" in watch.calls
    assert receiver.receive(1, 5.0) == []
    with pytest.raises(BrokerUnavailable, match="closed"):
        settle(receiver, [delivery], Complete())
    receiver.close()
    assert len(service.closed) == 3
    assert len(service.locked) == 1, "what is leased stays so until its lease ends"


def test_a_receiver_that_never_received_is_closed_too(service, make) -> None:
    make().close()
    assert service.closed == []


def test_a_lost_lock_is_the_service_s_word(service, make) -> None:
    """Also where it refuses without our having asked twice."""
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", MessageLockLostError())
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Lost]


def test_the_step_between_clone_and_original_has_a_name(service, make, monkeypatch) -> None:
    steps = []
    monkeypatch.setattr(module, "hit", lambda *step: steps.append(step) or hit(*step))
    receiver = make()
    deliveries = received(service, receiver, 2)
    settle(receiver, deliveries, Resubmit(1.0, envelope=Envelope(b"")))
    assert steps == [("cloned", 2)]
