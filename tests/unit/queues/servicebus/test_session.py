"""The receiver of sessions: who holds one, for how long, and what becomes of what came in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from azure.servicebus.exceptions import (
    MessageLockLostError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)
from busservice import LEASE, Answer, BusService, broken, finish, install

from aztask.errors import (
    AlreadySettled,
    BrokerUnavailable,
    ConfigurationError,
    LeaseLost,
    LeaseRefused,
    MessageTooLarge,
)
from aztask.message.envelope import Envelope
from aztask.queues.base import ANY_SESSION, ReceiverOptions
from aztask.queues.delivery import Delivery, Lost, Renewed, Settled, Unknown
from aztask.queues.servicebus import session as module
from aztask.queues.servicebus.receiver import request_seconds
from aztask.queues.servicebus.session import GONE, UNCONFIRMED, BusSessionReceiver
from aztask.settlement import Abandon, Complete, DeadLetter, Defer, Release, Resubmit, Settlement

Make = Callable[..., BusSessionReceiver]

SLICE, SHORTEST_ACCEPT, LONGEST_ACCEPT, OPEN_SECONDS = 0.02, 0.5, 30.0, 10.0
STALE = 0.1  # of a lease


class Watch:
    """Records what a receiver tells its `LockWatch`."""

    def __init__(self) -> None:
        self.refusal = ""
        self.found = ""
        self.locks: list[tuple[float, float, float]] = []
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def try_again(self) -> None:
        self.calls.append("try again")

    def messages(self, *_: Any) -> None:
        raise AssertionError("a message's lock is its session's: it teaches nothing")

    def lock(self, locked_until: float, received_at: float, asked_at: float) -> None:
        self.locks.append((locked_until, received_at, asked_at))

    def verdict(self) -> str:
        self.calls.append("verdict")
        self.refusal = self.found
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

    def make(session: Any = "s1", *, left: Any = (), **options: Any) -> BusSessionReceiver:
        """left: what `look` finds in the queue, by number; or what it raises."""

        def send(queue: str, envelopes: Any) -> None:
            service.requests.append(("send", queue, tuple(envelopes)))
            service.answer("send", service.links[0])

        def look(number: int) -> list[Any]:
            service.requests.append(("look", number))
            if isinstance(left, Exception):
                raise left
            return [each for each in left if each.sequence_number >= number][:1]

        watch = options.pop("watch", None)
        terms = ReceiverOptions("q", LEASE, session=session, **options)
        one = BusSessionReceiver(
            service.client, terms, send, peek=look, clock=service.clock, watch=watch
        )
        made.append(one)
        return one

    yield make
    for each in made:
        finish(each)


def received(service: BusService, receiver: BusSessionReceiver, count: int = 1) -> list[Any]:
    service.bring(count, session="s1")
    deliveries = receiver.receive(count, 1.0)
    assert len(deliveries) == count
    return deliveries


def settle(receiver: BusSessionReceiver, deliveries: list[Any], how: Settlement) -> list[Any]:
    return receiver.settle([(each, how) for each in deliveries])


def lose(service: BusService) -> None:
    """The service has given the session to another receiver."""
    service.holders.clear()
    service.locked.clear()


def break_off(service: BusService, receiver: BusSessionReceiver) -> None:
    """The connection breaks, and the session goes with it."""
    for link in service.links:
        link._running = False
    lose(service)


# -- receiving ---------------------------------------------------------------------------------


def test_one_connection_accepts_receives_renews_and_settles(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 2)
    receiver.renew(deliveries)
    settle(receiver, deliveries, Complete())
    (link,) = service.links
    assert link.options == {
        "queue": "q",
        "delete": False,
        "session": "s1",
        "request_seconds": request_seconds(LEASE),
        "session_wait": None,
    }
    assert [each.session for each in deliveries] == ["s1", "s1"]
    assert {each.holder for each in deliveries} == {link}
    assert service.kinds() == ["open", "renew-session", "complete"]


def test_the_deadline_is_a_lease_after_the_session_was_asked_for(service, make) -> None:
    """Of the first message and of the later ones: the lock is the session's."""
    receiver = make()
    service.request_takes = 1.0
    asked_at = service.time.now
    (first,) = received(service, receiver)
    service.time.now += 20.0
    (second,) = received(service, receiver)
    assert [each.deadline for each in (first, second)] == [asked_at + LEASE] * 2


@pytest.mark.parametrize(("took", "renewals"), [(STALE * LEASE, 0), (STALE * LEASE + 0.5, 1)])
def test_a_session_that_was_accepted_late_is_renewed_at_once(service, make, took, renewals) -> None:
    receiver = make()
    service.on_pull = lambda stop: setattr(service, "request_takes", 0.0)
    asked_at = service.time.now
    service.request_takes = took
    (delivery,) = received(service, receiver)
    assert service.kinds().count("renew-session") == renewals
    assert delivery.deadline == asked_at + took * renewals + LEASE


def test_a_receive_waits_in_slices_so_that_others_get_their_turn(service, make) -> None:
    receiver = make()
    assert receiver.receive(3, 1.0) == []
    assert {(limit, wait) for _, limit, wait in service.pulls} == {(3, 5 * SLICE)}
    (delivery,) = received(service, receiver)
    service.pulls.clear()
    receiver.receive(3, 0.2)
    assert {wait for _, _, wait in service.pulls} == {SLICE}, "something is held: it is renewed"
    settle(receiver, [delivery], Complete())
    service.pulls.clear()
    receiver.receive(3, 0.3)
    assert [wait for _, _, wait in service.pulls][1:] == [5 * SLICE] * (len(service.pulls) - 1)


def test_a_receive_ends_when_its_time_is_over(service, make) -> None:
    receiver = make()
    began = service.time.now
    assert receiver.receive(1, 3.0) == []
    assert 3.0 <= service.time.now - began <= 3.0 + 5 * SLICE + 0.001
    pulls = len(service.pulls)
    assert receiver.receive(1, 0.0) == []
    assert len(service.pulls) == pulls + 1, "at least one look"


def test_of_a_named_session_it_holds_on_and_any_session_is_let_go_of(service, make) -> None:
    named, other = make(), make(ANY_SESSION)
    for receiver in (named, other):
        (delivery,) = received(service, receiver)
        receiver.receive(1, 0.0)
        assert service.closed == [], "something is held in it"
        settle(receiver, [delivery], Complete())
        receiver.receive(1, 0.0)
        if receiver is named:
            assert service.closed == []
    assert service.closed == [service.links[1]]
    service.bring(session="s1")
    assert len(other.receive(1, 1.0)) == 1
    assert len(service.links) == 3, "the next session is a new connection"


def test_what_lapsed_in_it_does_not_hold_a_session(service, make) -> None:
    receiver = make(ANY_SESSION)
    (delivery,) = received(service, receiver)
    delivery.deadline = service.time.now + SLICE  # at the end of the next look
    service.fail("open", OperationTimeoutError(message="none"))
    receiver.receive(1, 0.0)
    assert len(service.closed) == 1


@pytest.mark.parametrize(
    ("wait", "accept"),
    [(0.0, SHORTEST_ACCEPT), (5.0, 5.0), (500.0, LONGEST_ACCEPT)],
)
def test_any_session_is_looked_for_as_long_as_the_receive_waits(
    service, make, wait, accept
) -> None:
    receiver = make(ANY_SESSION)
    service.bring(session="s1")
    receiver.receive(1, wait)
    assert service.links[0].options["session"] is ANY_SESSION
    assert service.links[0].options["session_wait"] == accept
    assert service.requests[0] == ("open", accept + OPEN_SECONDS)


def test_a_session_that_another_receiver_holds_is_waited_for(service, make) -> None:
    receiver = make()
    held = SessionCannotBeLockedError(message="held")
    service.fail("open", held, held)
    service.bring(session="s1")
    began = service.time.now
    assert len(receiver.receive(1, 10.0)) == 1
    assert service.time.now == began + 2 * SHORTEST_ACCEPT, "a pause after each refusal"
    assert len(service.dropped) == 2


def test_no_session_within_the_time_is_no_error(service, make) -> None:
    receiver = make()
    service.fail("open", *[SessionCannotBeLockedError(message="held")] * 9)
    service.time.now = 0.0
    assert receiver.receive(1, 1.2) == []
    assert service.time.now == pytest.approx(1.2), "the last pause is not longer"
    service.requests.clear()
    service.time.now = 0.0
    assert receiver.receive(1, 1.0) == []
    assert service.kinds() == ["open", "open"], "not once more at its very end"


def test_where_any_session_is_looked_for_the_service_makes_the_pauses(service, make) -> None:
    receiver = make(ANY_SESSION)
    service.fail("open", OperationTimeoutError(message="none"), None)
    service.bring(session="s1")
    began = service.time.now
    assert len(receiver.receive(1, 10.0)) == 1
    assert service.time.now == began


@pytest.mark.parametrize("session", ["s1", ANY_SESSION])
def test_a_session_that_is_lost_at_once_is_tried_again_after_a_pause(
    service, make, session
) -> None:
    receiver = make(session)
    service.fail("pull", SessionLockLostError(message="gone"))
    service.bring(session="s1")
    began = service.time.now
    assert len(receiver.receive(1, 10.0)) == 1
    assert service.time.now == began + SHORTEST_ACCEPT
    assert service.dropped == [service.links[0]]


@pytest.mark.parametrize("where", ["open", "pull"])
def test_what_trying_again_does_not_mend_is_raised(service, make, where) -> None:
    receiver = make()
    service.fail(where, ServiceBusAuthenticationError(message="no"))
    with pytest.raises(ConfigurationError):
        receiver.receive(1, 100.0)
    assert service.dropped == [service.links[0]]
    service.fail(where, broken())
    with pytest.raises(BrokerUnavailable):
        receiver.receive(1, 100.0)
    assert len(received(service, receiver)) == 1


def test_a_lease_that_ended_before_it_was_renewed_ends_the_session(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.time.now = delivery.deadline
    service.bring(session="s1")
    assert len(receiver.receive(1, 5.0)) == 1
    assert service.dropped == [service.links[0]]
    assert len(service.links) == 2
    assert settle(receiver, [delivery], Complete()) == [GONE]


def test_just_before_its_end_the_lease_is_good(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.time.now = delivery.deadline - 0.001
    service.bring(session="s1")
    assert len(receiver.receive(1, 5.0)) == 1
    assert len(service.links) == 1


def test_what_is_deleted_as_it_is_received_holds_nothing(service, make) -> None:
    receiver = make(ANY_SESSION, delete=True)
    (delivery,) = received(service, receiver)
    assert delivery.settled
    assert service.links[0].options["delete"] is True
    receiver.receive(1, 0.0)
    assert service.closed == [service.links[0]]


# -- the lock ----------------------------------------------------------------------------------


def test_the_sessions_lock_is_watched_at_its_grant_and_at_renewals(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    service.request_takes = 1.0
    began = service.time.now
    (delivery,) = received(service, receiver)
    assert watch.locks == [(began + 1.0 + LEASE, began + 1.0, began)]
    asked_at = service.time.now
    receiver.renew([delivery])
    assert watch.locks[1:] == [(asked_at + 1.0 + LEASE, asked_at + 1.0, asked_at)]
    assert watch.calls == ["start", "verdict"]


def test_a_session_that_does_not_say_when_its_lock_ends_teaches_nothing(
    service, make, monkeypatch
) -> None:
    watch = Watch()
    monkeypatch.setattr(module.private, "session_locked_until", lambda link: None)
    received(service, make(watch=watch))
    assert watch.locks == []


def test_a_session_under_a_lease_that_is_not_the_lock_is_given_back(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    watch.found = "the lock is 30 s"
    service.bring(session="s1")
    with pytest.raises(ConfigurationError, match="the lock is 30 s"):
        receiver.receive(1, 1.0)
    assert service.closed == [service.links[0]]
    assert receiver._owner is None
    watch.found = ""
    assert receiver.receive(1, 0.0) == []
    assert watch.calls == ["start", "verdict", "try again", "verdict"]


def test_without_messages_a_lease_is_not_judged_again(service, make) -> None:
    watch = Watch()
    receiver = make(watch=watch)
    receiver.receive(1, 0.0)
    assert watch.calls == ["start"]


# -- letting go --------------------------------------------------------------------------------


def test_letting_go_gives_the_session_back(service, make) -> None:
    receiver = make()
    receiver.let_go()
    assert service.links == [], "nothing is held"
    assert receiver._settling._thread is None
    (delivery,) = received(service, receiver)
    receiver.let_go()
    assert service.closed == [service.links[0]]
    assert receiver.renew([delivery]) == [GONE]
    assert settle(receiver, [delivery], Complete()) == [GONE]
    assert len(service.links) == 1, "neither takes another session by accident"
    receiver.let_go()
    assert len(service.closed) == 1


def test_letting_go_of_a_session_whose_connection_broke(service, make) -> None:
    receiver = make()
    received(service, receiver)
    break_off(service, receiver)
    receiver.let_go()
    assert len(service.links) == 1


def test_a_session_that_could_not_be_let_go_of(service, make) -> None:
    receiver = make()
    received(service, receiver)

    def refuse(link: Any) -> None:
        raise OSError("no way out")

    receiver._client.close = refuse
    with pytest.raises(BrokerUnavailable, match="no way out"):
        receiver.let_go()
    receiver._client.close = service._close


def test_closing_lets_go_of_the_session(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    thread = receiver._settling._thread
    receiver.close()
    thread.join(10.0)
    assert service.closed == [service.links[0]]
    assert receiver.receive(1, 5.0) == []
    receiver.let_go()
    with pytest.raises(BrokerUnavailable, match="closed"):
        receiver.renew([delivery])


def test_closing_ends_a_session_that_is_being_opened(service, make, monkeypatch) -> None:
    receiver = make()
    opening, ended = threading.Event(), threading.Event()

    def wait_for_the_end(link: Any, timeout: float) -> None:
        opening.set()
        assert ended.wait(10.0)
        raise broken()

    def end(link: Any) -> None:
        assert link is service.links[0]
        ended.set()

    monkeypatch.setattr(module.private, "open_link", wait_for_the_end)
    monkeypatch.setattr(module.private, "end", end)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(receiver.receive(1, 1000.0)))
    thread.start()
    assert opening.wait(10.0)
    receiver.close()
    thread.join(10.0)
    assert answers == [[]], "an error on the way out is none"
    assert service.dropped == [service.links[0]]


def test_a_session_that_cannot_be_ended_is_not_waited_for_longer_than_a_second(
    service, make, monkeypatch
) -> None:
    receiver = make()
    ends: list[float] = []
    monkeypatch.setattr(module.private, "end", lambda link: ends.append(service.time.now))
    receiver._opening = object()
    began = service.time.now
    receiver.close()
    assert ends[0] == began
    assert service.time.now == pytest.approx(began + 1.0, abs=2 * SLICE)


def test_a_receiver_that_was_closed_meanwhile_accepts_nothing(service, make) -> None:
    receiver = make()
    receiver._accept_until = service.time.now + 5.0
    receiver._closed = True
    with pytest.raises(SessionLockLostError, match="closed"):
        receiver._settling.call(lambda link: None)
    assert service.dropped == [service.links[0]]
    assert "open" not in service.kinds()
    receiver._closed = False


# -- renewals ----------------------------------------------------------------------------------


def test_renewing_one_renews_all_that_is_held_in_the_session(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 3)
    settle(receiver, deliveries[:1], Complete())
    service.time.now += 30.0
    service.request_takes = 2.0
    asked_at = service.time.now
    for seconds in (None, 5.0, 500.0):
        asked_at = service.time.now
        assert receiver.renew([deliveries[1]], seconds) == [Renewed(asked_at + LEASE)]
        assert deliveries[2].deadline == asked_at + LEASE
    (later,) = received(service, receiver)
    assert later.deadline == asked_at + LEASE
    assert ("renew-session", request_seconds(LEASE)) in service.requests
    service.requests.clear()
    assert receiver.renew([]) == []
    assert service.requests == []


def test_what_came_in_an_earlier_session_is_lost_although_this_one_is_renewed(
    service, make
) -> None:
    receiver = make()
    (old,) = received(service, receiver)
    receiver.let_go()
    (new,) = received(service, receiver)
    before = old.deadline
    service.time.now += 5.0
    assert receiver.renew([old, new]) == [GONE, Renewed(service.time.now + LEASE)]
    assert old.deadline == before


def test_a_session_that_is_lost_loses_all_that_is_held_in_it(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 2)
    deliveries[1].attempted = True
    lose(service)
    assert receiver.renew(deliveries) == [GONE, UNCONFIRMED]
    assert service.dropped == [service.links[0]]
    assert receiver._owner is None


def test_a_renewal_without_an_answer_keeps_the_session(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 2)
    before = deliveries[0].deadline
    service.fail("renew-session", OperationTimeoutError(message="too slow"))
    answers = receiver.renew(deliveries)
    assert [type(each) for each in answers] == [Unknown, Unknown]
    assert "too slow" in answers[0].reason
    assert deliveries[0].deadline == before
    assert service.dropped == []
    assert receiver.renew(deliveries) == [Renewed(service.time.now + LEASE)] * 2


# -- settling ----------------------------------------------------------------------------------


def test_a_batch_of_different_settlements(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 6)
    hows = [
        DeadLetter("a", "1"), Complete(), DeadLetter("b", "2"), Release(), Abandon(),
        Resubmit(5.0, envelope=Envelope(b"a")),
    ]  # fmt: skip
    assert receiver.settle(list(zip(deliveries, hows, strict=True))) == [Settled()] * 6
    got = {
        token: (verb, reason, text)
        for verb, tokens, reason, text in (r for r in service.requests if len(r) == 4)
        for token in tokens
    }
    assert [got.get(each.lock) for each in deliveries] == [
        ("dead-letter", "a", "1"),
        ("complete", "", ""),
        ("dead-letter", "b", "2"),
        None,
        ("abandon", "", ""),
        ("complete", "", ""),
    ]
    assert service.releases == [deliveries[3].lock]
    with pytest.raises(AlreadySettled):
        settle(receiver, deliveries[:1], Complete())


def test_a_release_that_the_link_cannot_do_is_abandoned(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.links[0].owned.clear()
    assert settle(receiver, [delivery], Release()) == [Settled()]
    assert "abandon" in service.kinds()


def test_an_original_whose_clone_could_not_be_sent_is_not_completed(service, make) -> None:
    receiver = make()
    deliveries = received(service, receiver, 2)
    service.fail("send", BrokerUnavailable("no way out"))
    hows = [Resubmit(5.0, envelope=Envelope(b"a")), Complete()]
    answers = receiver.settle(list(zip(deliveries, hows, strict=True)))
    assert answers == [Unknown("no way out"), Settled()]
    assert service.locked == {deliveries[0].lock}


def test_of_a_session_that_is_gone_the_rest_of_the_batch_is_settled(service, make) -> None:
    """Their answers stay in the order of the batch."""
    receiver = make()
    (old,) = received(service, receiver)
    receiver.let_go()
    first, second = received(service, receiver, 2)
    answers = receiver.settle([(first, Complete()), (old, DeadLetter("why")), (second, Abandon())])
    assert answers == [Settled(), GONE, Settled()]
    assert [first.settled, old.settled, second.settled] == [True, False, True]


def test_a_refusal_in_a_session_that_is_ours_is_a_refusal(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", MessageLockLostError())
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Lost]
    assert "look" not in service.kinds()


def test_a_refusal_with_which_the_session_ends_is_a_refusal(service, make, monkeypatch) -> None:
    """Nothing was tried before, so nothing can have been carried out."""
    receiver = make()
    (delivery,) = received(service, receiver)

    def refuse(link: Any, *_: Any) -> None:
        link._running = False
        raise SessionLockLostError(message="gone")

    monkeypatch.setattr(module.private, "settle_many", refuse)
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Lost]


def test_a_settlement_that_was_answered_is_done_whatever_becomes_of_the_session(
    service, make, monkeypatch
) -> None:
    """The service may show a settled message for a while: so the queue is not looked at."""
    left: list[Any] = []
    receiver = make(left=left)
    (delivery,) = received(service, receiver)
    left.append(delivery.message)
    delivery.attempted = True
    real = module.private.settle_many

    def last(link: Any, *order: Any) -> None:
        real(link, *order)
        link._running = False

    monkeypatch.setattr(module.private, "settle_many", last)
    assert settle(receiver, [delivery], Complete()) == [Settled()]
    assert "look" not in service.kinds()


def test_a_refusal_after_a_try_without_an_answer_in_the_same_session(service, make) -> None:
    """The connection is there still: until our deadline that try did it (rule 5 of receivers)."""
    left: list[Any] = []
    receiver = make(left=left)
    (delivery,) = received(service, receiver)
    left.append(delivery.message)
    service.fail("settle", Answer(OperationTimeoutError(message="too slow"), done=True))
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Unknown]
    assert settle(receiver, [delivery], Complete()) == [Settled()]
    assert "look" not in service.kinds()


# -- settlements without an answer -------------------------------------------------------------


def test_a_settlement_without_an_answer_is_not_repeated(service, make) -> None:
    """Its session has ended with the connection. The queue is looked at instead: it is gone."""
    receiver = make()
    (delivery,) = received(service, receiver)
    service.fail("settle", Answer(broken(), done=True))
    assert settle(receiver, [delivery], Complete()) == [Settled()]
    assert service.kinds().count("complete") == 1
    assert service.requests[-1] == ("look", 1)
    assert delivery.settled


@pytest.mark.parametrize(
    ("how", "state", "first", "later"),
    [
        (Complete(), 0, UNCONFIRMED, GONE),
        (DeadLetter("why"), 0, UNCONFIRMED, GONE),
        (Defer(), 0, UNCONFIRMED, GONE),
        (Defer(), 1, Settled(), Settled()),
        (Complete(), 1, UNCONFIRMED, GONE),
        (Abandon(), 0, Settled(), Settled()),
        (Release(), 0, Settled(), Settled()),
    ],
)
def test_what_is_still_in_the_queue_was_not_settled_as_far_as_we_know(
    service, make, how, state, first, later
) -> None:
    """What was to go back has gone back with its session. state: 1, deferred."""
    left: list[Any] = []
    receiver = make(left=left)
    (delivery,) = received(service, receiver)
    left.append(delivery.message)
    delivery.message._raw_amqp_message.annotations[b"x-opt-message-state"] = state
    service.links[0].owned.clear()  # a release goes as an abandon
    service.fail("settle", Answer(broken()))
    assert settle(receiver, [delivery], how) == [first]
    assert delivery.settled is (first == Settled())
    assert delivery.attempted
    if not delivery.settled:
        assert settle(receiver, [delivery], how) == [later]


def test_another_message_behind_it_does_not_mean_that_it_is_there(service, make) -> None:
    left: list[Any] = []
    receiver = make(left=left)
    first, second = received(service, receiver, 2)
    left.append(second.message)
    service.fail("settle", Answer(broken(), done=True))
    assert settle(receiver, [first], Complete()) == [Settled()]


@pytest.mark.parametrize("error", [broken(), BrokerUnavailable("away"), OSError("reset")])
def test_where_the_queue_cannot_be_looked_at_it_stays_unknown(service, make, error) -> None:
    receiver = make(left=error)
    (delivery,) = received(service, receiver)
    service.fail("settle", Answer(broken()))
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Unknown]
    assert [type(each) for each in settle(receiver, [delivery], Complete())] == [Unknown]
    assert not delivery.settled


def test_a_bug_while_looking_is_told_and_nothing_counts_as_settled(service, make) -> None:
    receiver = make(left=ValueError("a bug"))
    (delivery,) = received(service, receiver)
    service.fail("settle", Answer(broken()))
    with pytest.raises(ValueError, match="a bug"):
        settle(receiver, [delivery], Complete())
    assert not delivery.settled


def test_after_the_deadline_nothing_is_found_out_any_more(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    break_off(service, receiver)
    delivery.attempted = True
    service.time.now = delivery.deadline
    assert settle(receiver, [delivery], Complete()) == [GONE]
    service.time.now -= 0.001
    assert settle(receiver, [delivery], Complete()) == [Settled()]
    assert delivery.settled


def test_a_connection_that_is_closed_holds_no_session(service, make) -> None:
    receiver = make()
    (delivery,) = received(service, receiver)
    break_off(service, receiver)
    assert settle(receiver, [delivery], Complete()) == [GONE]
    assert "complete" not in service.kinds()


def test_what_comes_from_elsewhere_is_refused(service, make) -> None:
    receiver = make()
    foreign = Delivery("q", Envelope(b""), 1, "t", 1, 0.0, 0.0, LEASE)
    with pytest.raises(ConfigurationError, match="another broker"):
        settle(receiver, [foreign], Complete())


# -- the session's state -----------------------------------------------------------------------


def test_the_state_is_stored_with_the_session(service, make) -> None:
    receiver = make()
    received(service, receiver)
    assert receiver.session_state("s1") is None
    receiver.set_session_state("s1", b"page 7")
    assert receiver.session_state("s1") == b"page 7"
    service.state = bytearray(b"page 8")
    assert type(receiver.session_state("s1")) is bytes
    receiver.set_session_state("s1", None)
    assert service.state is None
    times = {each[1] for each in service.requests if each[0].endswith("-state")}
    assert times == {request_seconds(LEASE)}


def test_the_state_of_a_session_that_is_not_held_is_lost(service, make) -> None:
    receiver = make()
    for _ in range(2):
        with pytest.raises(LeaseLost):
            receiver.session_state("s1")
        with pytest.raises(LeaseLost):
            receiver.set_session_state("other", b"")
        received(service, receiver)
        receiver.let_go()
    received(service, receiver)
    with pytest.raises(LeaseLost):
        receiver.session_state("other")
    assert receiver.session_state("s1") is None


def test_a_state_that_is_too_large_is_refused(service, make) -> None:
    receiver = make(max_state_bytes=10)
    received(service, receiver)
    receiver.set_session_state("s1", b"x" * 10)
    with pytest.raises(MessageTooLarge, match="11 bytes"):
        receiver.set_session_state("s1", b"x" * 11)
    assert service.state == b"x" * 10


def test_the_state_of_a_session_that_was_lost_meanwhile(service, make) -> None:
    receiver = make()
    received(service, receiver)
    service.fail("state", SessionLockLostError(message="gone"))
    with pytest.raises(LeaseLost):
        receiver.session_state("s1")
    assert service.dropped == [service.links[0]]
    received(service, receiver)
    service.fail("state", OperationTimeoutError(message="slow"))
    with pytest.raises(BrokerUnavailable):
        receiver.session_state("s1")
    assert receiver.session_state("s1") is None, "it is held all the same"


def test_the_state_is_asked_for_only_over_the_connection_that_held_the_session(
    service, make, monkeypatch
) -> None:
    """Between the question and its turn another session may have been taken."""
    receiver = make()
    received(service, receiver)
    owned = receiver._owned
    another = service._receiver("q", session="s2")
    monkeypatch.setattr(receiver, "_owned", lambda request: owned(lambda link: request(another)))
    with pytest.raises(LeaseLost):
        receiver.session_state("s1")
    assert "get-state" not in service.kinds()
