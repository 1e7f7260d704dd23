"""One message under a lease: what each answer of a made-up broker means to its holder."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from heldbench import NOW, Bench

from aztask.errors import AlreadySettled, BrokerUnavailable, LeaseLost
from aztask.queues.delivery import Lost, Renewed, Unknown
from aztask.queues.lease.held import HeldLease
from aztask.queues.lease.state import Lease, LeaseEvent, LeaseState
from aztask.settlement import Abandon, Complete, DeadLetter, Release, Settlement


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_message_that_came_is_held(bench: Bench) -> None:
    with bench.held(session="s1") as lease:
        assert bench.asked == [("orders", {"lease": 60.0, "session": "s1"})]
        assert (lease.body, lease.delivery.position) == (b"order 1", 7)
        assert lease._held().limit_at == NOW + 500.0
        assert lease._held().seconds == 60.0
        assert len(lease._keeper) == 1, "it is renewed"
        lease.complete()
        assert len(lease._keeper) == 0
    assert bench.receiver.closed == 1


@pytest.mark.parametrize(
    ("wait", "waits"), [(2.5, [1.0, 1.0, 1.0]), (0.4, [0.4]), (0.0, [0.0]), (1.0, [1.0])]
)
def test_where_nothing_comes_it_says_so(bench: Bench, wait: float, waits: list[float]) -> None:
    bench.clock.now = 0.0
    with pytest.raises(LookupError, match="no message came on 'orders'"), bench.lease(wait=wait):
        raise AssertionError("nothing is held")
    assert bench.receiver.waits == [(1, each) for each in waits]
    assert bench.receiver.closed == 1


def test_it_waits_for_a_message(bench: Bench) -> None:
    bench.receiver.brings.extend([[], [], [bench.delivery()]])
    with bench.lease() as lease:
        assert lease.delivery.position == 7


def test_what_cannot_be_read_is_dead_lettered_and_the_next_is_held(bench: Bench) -> None:
    bad = bench.delivery(problem="no UTF-8")
    bench.receiver.brings.append([bad])
    with bench.held() as lease:
        assert bench.receiver.settled == [(bad, DeadLetter("undecodable", "no UTF-8"))]
        lease.complete()


@pytest.mark.parametrize(("left", "lost"), [(0.001, False), (0.0, True), (-5.0, True)])
def test_it_is_lost_at_its_deadline(bench: Bench, left: float, lost: bool) -> None:
    with bench.held() as lease:
        bench.clock.now = lease.delivery.deadline - left
        assert lease.lost is lost
        assert lease.remaining_seconds == pytest.approx(max(0.0, left), abs=1e-6)
        if lost:
            with pytest.raises(LeaseLost):
                lease.ensure()
        else:
            lease.ensure()


def test_it_says_why_it_was_lost(bench: Bench) -> None:
    with bench.held() as lease:
        lease._keeper.begin(lease._held())
        lease._keeper.lapse(lease._held(), "another worker has it")
        with pytest.raises(LeaseLost, match="another worker has it"):
            lease.ensure()
    assert bench.receiver.settled == [], "leaving the block settles nothing"


@pytest.mark.parametrize(
    ("settle", "how"),
    [
        (lambda lease: lease.complete(), Complete()),
        (lambda lease: lease.abandon(), Abandon()),
        (lambda lease: lease.release(), Release()),
        (lambda lease: lease.dead_letter("why"), DeadLetter("why")),
        (lambda lease: lease.dead_letter("why", "how"), DeadLetter("why", "how")),
        (lambda lease: None, Abandon()),
    ],
)
def test_it_is_settled_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, settle: Any, how: Settlement
) -> None:
    with bench.held() as lease:
        settle(lease)
    assert caplog.text == "", "nothing went wrong"
    assert [each for _, each in bench.receiver.settled] == [how]
    with pytest.raises(AlreadySettled):
        lease.complete()


def test_a_settlement_that_was_refused_is_a_lost_lease(bench: Bench) -> None:
    bench.receiver.answers.append(Lost("taken over"))
    with bench.held() as lease:
        with pytest.raises(LeaseLost, match="taken over"):
            lease.complete()
        assert lease.lost
    assert len(bench.receiver.settled) == 1


@pytest.mark.parametrize("answer", [Unknown("no answer"), BrokerUnavailable("no answer")])
def test_a_settlement_without_an_answer_can_be_repeated(bench: Bench, answer: Any) -> None:
    bench.receiver.answers.append(answer)
    with bench.held() as lease:
        with pytest.raises(BrokerUnavailable, match="no answer"):
            lease.complete()
        assert lease._held().state is LeaseState.HELD
        lease.complete()
    assert bench.receiver.settled[-1][1] == Complete()
    assert Abandon() not in [how for _, how in bench.receiver.settled]


def test_an_error_while_leaving_does_not_hide_the_blocks_own(bench: Bench) -> None:
    bench.receiver.answers.append(BrokerUnavailable("away"))
    with pytest.raises(ValueError, match="bad order"), bench.held() as lease:
        raise ValueError("bad order")
    assert bench.receiver.closed == 1
    assert not lease._keeper._thread.is_alive()


def test_while_it_is_renewed_leaving_waits_and_then_abandons(bench: Bench) -> None:
    with bench.held() as lease:
        lease._held().state = LeaseState.RENEWING
        lease._keeper._wait_for_renewal = lambda held: setattr(held, "state", LeaseState.HELD)
    assert [each for _, each in bench.receiver.settled] == [Abandon()]


def test_its_keeper_renews_as_it_was_told(bench: Bench) -> None:
    with bench.held() as lease:
        assert lease._keeper._book.next_at() == lease.delivery.deadline, "here: not at all"
        assert lease._keeper._clock is bench.clock


def test_outside_of_its_block_it_holds_nothing(bench: Bench) -> None:
    lease = bench.held()
    for use in (lambda: lease.delivery, lease.ensure, lease.complete):
        with pytest.raises(RuntimeError, match="context manager"):
            use()


class BrokenLibrary(Exception):
    """What a client library may raise, which is no error of aztask."""


@pytest.mark.parametrize("broken", ["settle", "close"])
def test_whatever_the_clean_up_raises_the_blocks_own_error_comes_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise BrokenLibrary("the connection is in an unknown state")

    monkeypatch.setattr(bench.receiver, broken, fail)
    with pytest.raises(ValueError, match="the block's own"), bench.held() as lease:
        raise ValueError("the block's own")
    assert "BrokenLibrary: the connection is in an unknown state" in caplog.text
    assert lease._keeper._stopping
    assert bench.receiver.closed == (0 if broken == "close" else 1)


@pytest.mark.parametrize("answer", ["renewed", "none"])
def test_leaving_while_a_renewal_hangs_waits_for_it_within_the_lease(
    bench: Bench, answer: str
) -> None:
    """The block's own error comes out; the message is abandoned if the renewal got an answer."""
    lease = bench.held()
    with pytest.raises(ValueError, match="the block's own"), lease:
        held = lease._held()
        held.change(LeaseEvent.RENEW)
        if answer == "renewed":
            threading.Timer(0.2, hear, (lease, held)).start()
        else:
            bench.clock.now = held.deadline
        raise ValueError("the block's own")
    abandoned = [each for _, each in bench.receiver.settled]
    assert abandoned == ([Abandon()] if answer == "renewed" else [])
    assert bench.receiver.closed == 1


def test_settling_while_a_renewal_hangs_waits_for_it(bench: Bench) -> None:
    with bench.held() as lease:
        held = lease._held()
        held.change(LeaseEvent.RENEW)
        threading.Timer(0.2, hear, (lease, held)).start()
        lease.complete()
    assert [each for _, each in bench.receiver.settled] == [Complete()]


def hear(lease: HeldLease, held: Lease) -> None:
    """The answer to the renewal arrives."""
    keeper = lease._keeper
    with keeper._condition:
        keeper._book_answer(held, Renewed(NOW + 120.0), NOW)
        keeper._condition.notify_all()
