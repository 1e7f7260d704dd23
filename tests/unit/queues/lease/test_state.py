"""The lease table and the renewal schedule, on a clock of the test's own."""

from __future__ import annotations

import itertools

import pytest

from aztask.errors import AlreadySettled, LeaseLost
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Delivery, Lost, Renewed, Unknown
from aztask.queues.lease.state import (
    NO_RENEWAL,
    TRANSITIONS,
    Lease,
    LeaseBook,
    LeaseEvent,
    LeaseState,
)

positions = itertools.count(1)


def a_lease(granted_at: float = 0.0, seconds: float = 10.0, enqueued_at: float = 0.0) -> Lease:
    delivery = Delivery(
        "q", Envelope(b""), next(positions), "token", 1, enqueued_at, granted_at + seconds, seconds
    )
    return Lease(delivery, seconds, granted_at)


def a_book(*leases: Lease, **options: bool) -> LeaseBook:
    book = LeaseBook(**options)
    for lease in leases:
        book.add(lease)
    return book


def renew(book: LeaseBook, lease: Lease, at: float) -> None:
    """What the keeper does when the broker says yes."""
    lease.delivery.deadline = at + lease.seconds
    lease.delivery.lease_seconds = lease.seconds
    book.answered(lease, Renewed(lease.delivery.deadline), at)


def test_due_at_seventy_percent_of_the_lease() -> None:
    lease = a_lease()
    book = a_book(lease)
    assert book.next_at() == pytest.approx(7.0)
    assert book.take_due(6.9) == ([], [])
    assert book.take_due(7.0) == ([lease], [])
    assert lease.state is LeaseState.RENEWING


def test_an_hour_old_redelivered_message_renews_at_seventy_percent_of_its_lease_too() -> None:
    lease = a_lease(granted_at=3600.0, enqueued_at=-3600.0)
    book = a_book(lease)
    assert book.next_at() == pytest.approx(3607.0)
    book.take_due(3607.0)
    renew(book, lease, 3607.0)
    assert book.next_at() == pytest.approx(3614.0)


def test_the_share_is_adjustable() -> None:
    assert LeaseBook(renew_at=0.5).next_at() is None
    book = LeaseBook(renew_at=0.5)
    book.add(a_lease())
    assert book.next_at() == pytest.approx(5.0)


def test_without_renewal_a_lease_ends_unless_more_time_is_asked_for() -> None:
    book = LeaseBook(renew_at=NO_RENEWAL)
    plain, asking = a_lease(1.0 / 3.0, 0.1), a_lease(0.0, 0.6)
    book.add(plain)
    book.add(asking)
    assert book.take_due(plain.deadline - 1e-6) == ([], [])
    asking.seconds = 5.0
    book.hurry(asking, 0.1)
    assert book.take_due(0.1) == ([asking], [])  # nobody goes along
    renew(book, asking, 0.1)
    assert book.take_due(plain.deadline) == ([], [plain])
    assert plain.state is LeaseState.LOST
    assert book.next_at() == pytest.approx(asking.deadline)


def test_leases_past_half_go_along_with_one_that_is_due_and_younger_ones_wait() -> None:
    due, half, young = a_lease(0.0), a_lease(1.5), a_lease(4.0)
    book = a_book(due, half, young)
    assert set(book.take_due(7.0)[0]) == {due, half}
    assert young.state is LeaseState.HELD


def test_thousands_of_leases_take_few_rounds() -> None:
    leases = [a_lease(n * 0.001) for n in range(2000)]
    book = a_book(*leases)
    renewed, _ = book.take_due(7.0)
    assert len(renewed) == 2000


def test_a_failed_renewal_is_tried_again_before_the_deadline_and_then_lapses() -> None:
    lease = a_lease()
    book = a_book(lease)
    now, tries = 7.0, 0
    while now < 10.0:
        assert book.take_due(now)[0] == [lease]
        book.answered(lease, Unknown("no reply"), now)
        tries += 1
        now = book.next_at() or 99.0
    assert tries >= 3
    assert book.take_due(10.0) == ([], [lease])
    assert lease.state is LeaseState.LOST
    assert not lease.alive(9.0)


def test_after_a_failure_the_next_success_restores_the_schedule() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.take_due(7.0)
    book.answered(lease, Unknown(), 7.0)
    at = book.next_at() or 0.0
    assert book.take_due(at)[0] == [lease]
    renew(book, lease, at)
    assert lease.failures == 0
    assert book.next_at() == pytest.approx(at + 7.0)


def test_lost_by_the_brokers_verdict() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.take_due(7.0)
    book.answered(lease, Lost("somebody else has it"), 7.0)
    assert lease.state is LeaseState.LOST
    assert lease.lost_reason == "somebody else has it"
    assert book.next_at() is None


def test_a_lost_reply_with_a_stale_token_runs_to_the_confirmed_deadline() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.take_due(7.0)
    book.token_gone(lease)
    assert lease.alive(9.9)
    with pytest.raises(RuntimeError):
        lease.change(LeaseEvent.SETTLE)
    assert book.take_due(9.9) == ([], [])
    assert book.take_due(10.0) == ([], [lease])


def test_renewal_past_the_limit_is_shortened() -> None:
    lease = a_lease()
    lease.limit_at = 12.0
    book = a_book(lease)
    assert book.take_due(7.0)[0] == [lease]
    assert book.renewal_seconds(lease, 7.0) == pytest.approx(5.0)


def test_renewal_past_the_limit_is_not_made_where_the_service_sets_the_duration() -> None:
    lease = a_lease()
    lease.limit_at = 12.0
    book = a_book(lease, fixed_lease=True)
    assert book.take_due(7.0) == ([], [])
    assert lease.state is LeaseState.HELD
    assert book.take_due(10.0) == ([], [lease])


def test_renewal_goes_on_until_the_limit_and_then_no_more() -> None:
    lease = a_lease()
    lease.limit_at = 25.0
    book = a_book(lease)
    renewals = 0
    now = book.next_at() or 0.0
    while now < 60.0:
        due, lapsed = book.take_due(now)
        if lapsed:
            break
        if due:
            seconds = book.renewal_seconds(lease, now) or 0.0
            lease.delivery.deadline = now + seconds
            lease.delivery.lease_seconds = seconds
            book.answered(lease, Renewed(lease.delivery.deadline), now)
            renewals += 1
        now = max(now + 0.01, book.next_at() or 60.0)
    assert renewals >= 2
    assert lease.state is LeaseState.LOST
    assert lease.deadline == pytest.approx(25.0, abs=0.1)


def test_no_renewal_while_settling_and_none_after() -> None:
    lease = a_lease()
    book = a_book(lease)
    lease.change(LeaseEvent.SETTLE)
    assert book.take_due(7.0) == ([], [])
    lease.change(LeaseEvent.SETTLED)
    book.drop(lease)
    assert book.next_at() is None


def test_a_settlement_without_an_answer_is_held_and_renewed_on() -> None:
    lease = a_lease()
    book = a_book(lease)
    lease.change(LeaseEvent.SETTLE)
    book.take_due(7.5)
    book.retry_settlement(lease, 7.5)
    assert book.take_due(7.5)[0] == [lease]


def test_a_second_settlement_is_a_clear_error() -> None:
    lease = a_lease()
    lease.change(LeaseEvent.SETTLE)
    with pytest.raises(AlreadySettled):
        lease.change(LeaseEvent.SETTLE)
    lease.change(LeaseEvent.SETTLED)
    with pytest.raises(AlreadySettled):
        lease.change(LeaseEvent.SETTLE)


def test_nothing_is_settled_under_a_lost_lease() -> None:
    lease = a_lease()
    lease.change(LeaseEvent.LAPSE)
    lease.lost_reason = "the deadline passed"
    with pytest.raises(LeaseLost, match="the deadline passed"):
        lease.change(LeaseEvent.SETTLE)


def test_work_is_told_to_stop_before_the_deadline() -> None:
    assert a_lease(seconds=10.0).stop_at == pytest.approx(9.0)
    assert a_lease(seconds=300.0).stop_at == pytest.approx(298.0)


@pytest.mark.parametrize("state", list(LeaseState))
@pytest.mark.parametrize("event", list(LeaseEvent))
def test_every_missing_row_is_an_error(state: LeaseState, event: LeaseEvent) -> None:
    lease = a_lease()
    lease.state = state
    if (state, event) in TRANSITIONS:
        lease.change(event)
        assert lease.state is TRANSITIONS[state, event]
    else:
        with pytest.raises((AlreadySettled, LeaseLost, RuntimeError)):
            lease.change(event)
        assert lease.state is state


def test_the_book_counts_and_lists_what_it_holds() -> None:
    leases = [a_lease(), a_lease()]
    book = a_book(*leases)
    assert len(book) == 2
    assert set(book) == set(leases)
    book.drop(leases[0])
    assert list(book) == [leases[1]]


def test_states_and_events_are_shown_by_their_names() -> None:
    for kind in (*LeaseState, *LeaseEvent):
        assert kind.value == kind.name.lower().replace("_", " ")
    with pytest.raises(RuntimeError, match="a lease that is held cannot token gone"):
        a_lease().change(LeaseEvent.TOKEN_GONE)


def test_a_lease_is_alive_until_its_deadline_and_not_at_it() -> None:
    lease = a_lease()
    assert lease.alive(9.999)
    assert not lease.alive(10.0)
    lease.state = LeaseState.LOST
    assert not lease.alive(0.0)


def test_an_empty_book_has_nothing_due() -> None:
    book = LeaseBook()
    assert book.next_at() is None
    assert book.take_due(1e9) == ([], [])


def test_a_dropped_lease_is_due_no_more_wherever_it_stands() -> None:
    first, second, third = a_lease(0.0), a_lease(0.1), a_lease(0.2)
    book = a_book(first, second, third)
    book.drop(first)
    assert book.next_at() == pytest.approx(7.1)
    book.add(first)
    book.drop(second)
    assert book.take_due(7.3) == ([first, third], [])
    assert second.state is LeaseState.HELD


def test_at_half_of_its_lease_one_goes_along_and_a_moment_before_it_does_not() -> None:
    due, half, less = a_lease(0.0), a_lease(2.0), a_lease(2.001)
    book = a_book(due, half, less)
    assert book.take_due(7.0)[0] == [due, half]


def test_a_failed_renewal_waits_for_its_turn_although_others_are_due() -> None:
    failed, other = a_lease(0.0), a_lease(0.1)
    book = a_book(failed)
    book.take_due(7.0)
    book.answered(failed, Unknown(), 7.0)
    book.add(other)
    assert book.take_due(7.15) == ([other], [])


def test_the_pauses_between_failed_renewals_double_up_to_a_tenth_of_the_lease() -> None:
    lease = a_lease()
    book = a_book(lease)
    at, asked = 7.0, []
    while at < 10.0:
        asked.append(at)
        assert book.take_due(at)[0] == [lease]
        book.answered(lease, Unknown(), at)
        at = book.next_at() or 99.0
    assert asked == pytest.approx([7.0, 7.2, 7.6, 8.4, 9.4])
    assert at == 10.0, "the last try is not later than the deadline"


def test_renewals_are_counted_and_failures_only_in_a_row() -> None:
    lease = a_lease()
    book = a_book(lease)
    assert (lease.renewals, lease.failures) == (0, 0)
    for at, answers in ((7.0, 1), (14.0, 2), (21.0, 3)):
        book.take_due(at)
        book.answered(lease, Unknown(), at)
        again = book.next_at() or 0.0
        book.take_due(again)
        assert lease.failures == 1
        renew(book, lease, again)
        assert (lease.renewals, lease.failures) == (answers, 0)
        lease.granted_at, lease.delivery.deadline = at, at + 10.0
        book.hurry(lease, at + 7.0)


def test_no_renewal_falls_due_by_a_rounding_error() -> None:
    """The worker reckons `granted_at` back from the deadline."""
    deadline, seconds = 52.4, 15.3
    lease = a_lease(deadline - seconds, seconds)
    lease.delivery.deadline = deadline
    assert lease.granted_at + 1.0 * seconds < deadline
    book = LeaseBook(renew_at=1.0)
    book.add(lease)
    assert book.next_at() == deadline
    assert book.take_due(lease.granted_at + seconds) == ([], [])


@pytest.mark.parametrize(
    ("limit_at", "seconds"),
    [
        (None, 10.0),
        (17.0, 10.0),  # exactly to the limit
        (16.9, 9.9),
        (10.05, 3.05),
        (10.0, None),  # the lease lasts as long as the limit anyway
        (8.0, None),
        (7.0, None),
    ],
)
def test_how_long_a_renewal_asks_for_near_the_limit(
    limit_at: float | None, seconds: float | None
) -> None:
    lease = a_lease()
    lease.limit_at = limit_at
    book = a_book(lease)
    assert book.renewal_seconds(lease, 7.0) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(("limit_at", "seconds"), [(17.0, 10.0), (16.9, None)])
def test_where_the_service_sets_the_duration_a_renewal_may_end_at_the_limit(
    limit_at: float, seconds: float | None
) -> None:
    lease = a_lease()
    lease.limit_at = limit_at
    assert a_book(lease, fixed_lease=True).renewal_seconds(lease, 7.0) == seconds


@pytest.mark.parametrize(("left", "asked"), [(0.0499, False), (0.05, True), (0.06, True)])
def test_a_renewal_of_next_to_nothing_is_not_made(left: float, asked: bool) -> None:
    lease = a_lease(seconds=0.02)
    lease.seconds = 10.0
    lease.limit_at = left
    seconds = a_book(lease).renewal_seconds(lease, 0.0)
    assert seconds == (left if asked else None)


def test_the_brokers_verdict_without_a_reason_gets_one() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.take_due(7.0)
    book.answered(lease, Lost(""), 7.0)
    assert lease.lost_reason
    assert len(book) == 0


def test_the_first_reason_of_a_loss_stays() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.lapse(lease, "first")
    book.lapse(lease, "second")
    assert lease.lost_reason == "first"
    assert len(book) == 0, "what has lapsed is forgotten"


def test_a_failed_settlement_does_not_hurry_the_renewal() -> None:
    lease = a_lease()
    book = a_book(lease)
    lease.change(LeaseEvent.SETTLE)
    book.retry_settlement(lease, 3.0)
    assert book.next_at() == pytest.approx(7.0)


@pytest.mark.parametrize("event", [LeaseEvent.SETTLE, LeaseEvent.RENEW])
def test_at_the_deadline_a_request_under_way_is_waited_for(event: LeaseEvent) -> None:
    """Its answer decides: a settlement that took effect in time is no loss."""
    lease = a_lease()
    book = a_book(lease)
    lease.change(event)
    state = lease.state
    assert book.take_due(10.0) == ([], [])
    assert lease.state is state


def test_a_lease_whose_token_is_gone_lapses_at_its_deadline_although_it_is_hurried() -> None:
    lease = a_lease()
    book = a_book(lease)
    book.take_due(7.0)
    book.token_gone(lease)
    book.hurry(lease, 7.5)
    assert book.take_due(7.5) == ([], [])
    assert lease.state is LeaseState.UNKNOWN
    assert book.next_at() == 10.0
    assert book.take_due(10.0) == ([], [lease])
