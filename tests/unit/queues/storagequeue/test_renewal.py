"""Renewals on a Storage queue, where every renewal changes the token and two may be in flight."""

from __future__ import annotations

import itertools

import pytest
import queueservice
from queueservice import (
    BROKEN,
    BUSY,
    DENIED,
    FAILED,
    FAILED_LATE,
    FAULTS,
    LOST,
    MISSED,
    OK,
    UNSENT,
)

from aztask.queues.delivery import Lost, Renewed, Settled, Unknown
from aztask.queues.storagequeue.settling import ENDED, GONE, LATE, VANISHED
from aztask.settlement import Complete

make, bench = queueservice.make, queueservice.bench
LEASE = 10.0
START = 1000.0


def ask(bench, delivery, seconds=LEASE):
    """Ask for a renewal; the service has not got it yet."""
    assert bench.renewals.renew(delivery, seconds) == LATE


def two(bench, *, seconds=LEASE):
    """A delivery with two renewals in flight, asked for at 7 s and later, of a lease of 10 s."""
    delivery = bench.delivery(lease=LEASE)
    bench.time.now = START + 7.0
    ask(bench, delivery, seconds)
    ask(bench, delivery, seconds)
    assert [each.asked_at for each in delivery.attempts] == [START + 7.0, START + 7.75]
    return delivery


def outcome_of(bench, delivery, *numbers):
    """What the answers to these requests, in their order, say last."""
    outcome = None
    for number in numbers:
        bench.thread_pool.deliver(number)
        outcome = bench.renewals.collect(delivery) or outcome
    return outcome


# -- one request -------------------------------------------------------------------------------


def test_a_renewal_counts_from_the_moment_before_it_was_asked_for(bench):
    delivery = bench.delivery()
    bench.time.now += 7.0
    ask(bench, delivery)
    bench.thread_pool.deliver(0)
    assert bench.renewals.renew(delivery, LEASE) == Renewed(START + 17.0)
    assert (delivery.deadline, delivery.lease_seconds) == (START + 17.0, LEASE)
    assert LATE.untouched, "the token that comes late still counts"
    assert delivery.token == bench.service.messages["m-0"].token == "token-1"
    assert delivery.attempts == []


def test_an_answer_that_came_between_two_calls_counts_although_the_old_deadline_has_passed(bench):
    delivery = bench.delivery()
    bench.time.now = START + 9.0
    ask(bench, delivery)
    bench.thread_pool.deliver(0)
    bench.time.now = START + 10.5
    assert bench.renewals.renew(delivery, LEASE) == Renewed(START + 19.0)


def test_an_answer_that_comes_at_once_is_taken_at_once(bench, monkeypatch):
    delivery = bench.delivery()
    submit = bench.thread_pool.submit

    def at_once(call):
        future = submit(call)
        bench.thread_pool.deliver(0)
        return future

    monkeypatch.setattr(bench.thread_pool, "submit", at_once)
    assert bench.renewals.renew(delivery, 60.0) == Renewed(START + 60.0)
    assert bench.service.asked == [("update", "m-0", "token-0", 60, 60.0)]


@pytest.mark.parametrize(
    ("lease", "at", "patience"), [(10.0, 0.0, 1.0), (10.0, 7.0, 0.75), (2.0, 1.2, 0.2)]
)
def test_a_call_waits_a_quarter_of_what_is_left_and_a_second_at_most(bench, lease, at, patience):
    delivery = bench.delivery(lease=lease)
    bench.time.now += at
    ask(bench, delivery, lease)
    assert bench.waited == [pytest.approx(patience)]


def test_from_the_deadline_on_nothing_is_asked(bench):
    delivery = bench.delivery()
    bench.time.now = START + 9.999
    ask(bench, delivery)
    late = bench.delivery("m-1", lease=LEASE)
    bench.time.now += LEASE
    assert bench.renewals.renew(late, LEASE) == ENDED
    assert len(bench.thread_pool.calls) == 1


@pytest.mark.parametrize("seconds", [2.0, 9.5])
def test_a_renewal_that_asks_for_less_shortens_the_lease(bench, seconds):
    """The message is visible again at the earlier time."""
    delivery = bench.delivery(lease=100.0)
    ask(bench, delivery, seconds)
    assert delivery.deadline == START + seconds, "from the moment it is sent"
    bench.thread_pool.deliver(0)
    assert bench.renewals.collect(delivery) == Renewed(START + seconds)
    assert (delivery.deadline, delivery.lease_seconds) == (START + seconds, seconds)
    assert delivery.deadline <= bench.service.messages["m-0"].visible_at


def test_a_shorter_renewal_whose_answer_is_lost_leaves_the_shorter_lease(bench):
    delivery = bench.delivery(lease=100.0)
    bench.service.faults.append(LOST)
    ask(bench, delivery, 5.0)
    assert outcome_of(bench, delivery, 0) == VANISHED
    assert delivery.deadline == START + 5.0


def test_a_longer_renewal_moves_the_deadline_only_when_it_is_known_to_have_worked(bench):
    delivery = bench.delivery(lease=LEASE)
    bench.service.faults.append(LOST)
    ask(bench, delivery, 100.0)
    assert delivery.deadline == START + LEASE
    assert outcome_of(bench, delivery, 0) == VANISHED
    assert delivery.deadline == START + LEASE


@pytest.mark.parametrize("fault", [UNSENT, BUSY, DENIED])
def test_what_certainly_did_not_happen_is_asked_again_with_the_same_token(bench, fault):
    delivery = bench.delivery()
    bench.service.faults.append(fault)
    ask(bench, delivery)
    answer = outcome_of(bench, delivery, 0)
    assert isinstance(answer, Unknown)
    assert answer.untouched
    assert answer.reason
    assert bench.renewals.finish(delivery, delivery.deadline) is None
    ask(bench, delivery)
    assert isinstance(outcome_of(bench, delivery, 1), Renewed)
    assert [each[2] for each in bench.service.asked] == ["token-0", "token-0"]


@pytest.mark.parametrize("fault", [UNSENT, BUSY, DENIED])
def test_finishing_after_what_certainly_did_not_happen_leaves_the_token(bench, fault):
    delivery = bench.delivery()
    bench.service.faults.append(fault)
    ask(bench, delivery)
    bench.thread_pool.deliver(0)
    assert bench.renewals.finish(delivery, delivery.deadline) is None
    assert delivery.token == bench.service.messages["m-0"].token


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_connection_leaves_the_lease_unknown(bench, fault):
    delivery = bench.delivery()
    bench.service.faults.append(fault)
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 0) == VANISHED
    assert not VANISHED.untouched


@pytest.mark.parametrize("then", [[], [FAILED], [BUSY], [UNSENT], [FAILED, BUSY]])
def test_after_http_500_a_renewal_is_asked_again_within_the_lease(bench, then):
    delivery = bench.delivery()
    bench.service.faults.extend([FAILED, *then])
    for number in range(1 + len(then)):
        ask(bench, delivery)
        answer = outcome_of(bench, delivery, number)
        assert isinstance(answer, Unknown)
        assert answer.untouched
    ask(bench, delivery)
    assert isinstance(outcome_of(bench, delivery, 1 + len(then)), Renewed)
    assert not delivery.doubtful


def test_a_refusal_after_http_500_is_no_loss_but_unknown(bench):
    """The service had renewed the lease before it failed, so another worker cannot have it."""
    delivery = bench.delivery()
    bench.service.faults.append(FAILED_LATE)
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 0).untouched
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 1) == VANISHED


@pytest.mark.parametrize("fault", BROKEN)
def test_a_connection_that_breaks_after_http_500_leaves_the_lease_unknown(bench, fault):
    delivery = bench.delivery()
    bench.service.faults.extend([FAILED, fault])
    for number in range(2):
        ask(bench, delivery)
        answer = outcome_of(bench, delivery, number)
    assert answer == VANISHED


@pytest.mark.parametrize("settling", [[], [FAILED]])
@pytest.mark.parametrize(("fault", "settled"), [(FAILED, True), (FAILED_LATE, False)])
def test_a_settlement_after_a_renewal_with_http_500_claims_nothing(bench, fault, settled, settling):
    delivery = bench.delivery()
    bench.service.faults.extend([fault, *settling])
    ask(bench, delivery)
    bench.thread_pool.deliver(0)
    answer = bench.settling.settle(delivery, Complete())
    assert answer == (Settled() if settled else VANISHED)
    assert ("m-0" in bench.service.messages) is not settled


def test_a_refusal_of_the_only_request_is_a_loss(bench):
    delivery = bench.delivery()
    bench.service.messages["m-0"].token = "another worker's"
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 0) == GONE


def test_after_a_settlement_in_doubt_a_message_that_is_gone_was_removed_by_us(bench):
    delivery = bench.delivery()
    delivery.unsure = True
    del bench.service.messages["m-0"]
    bench.time.now += 3.0
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 0) == Renewed(START + 3.0 + LEASE)
    assert delivery.removed
    bench.time.now += 50.0
    assert bench.renewals.renew(delivery, 20.0) == Renewed(bench.time.now + 20.0)
    assert len(bench.thread_pool.calls) == 1


@pytest.mark.parametrize("unsure", [True, False])
def test_only_a_missing_message_and_a_doubt_together_say_that_we_removed_it(bench, unsure):
    delivery = bench.delivery()
    delivery.unsure = unsure
    if unsure:  # it is there, under another worker's token
        bench.service.messages["m-0"].token = "another worker's"
    else:
        del bench.service.messages["m-0"]
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 0) == GONE
    assert not delivery.removed


# -- the second request ------------------------------------------------------------------------


def test_a_second_request_is_sent_when_a_quarter_of_the_lease_brought_no_answer(bench):
    delivery = bench.delivery()
    ask(bench, delivery)  # waits for a second
    bench.time.now = START + 2.499
    ask(bench, delivery)
    assert len(bench.thread_pool.calls) == 1
    bench.time.now = START + 2.5
    ask(bench, delivery)
    assert len(bench.thread_pool.calls) == 2
    bench.time.now = START + 9.0
    ask(bench, delivery)
    assert len(bench.thread_pool.calls) == 2, "there is never a third"


def test_while_the_answer_of_the_one_that_worked_is_to_come_nothing_is_asked(bench):
    delivery = two(bench)
    bench.thread_pool.carry_out(0)
    bench.thread_pool.deliver(1)
    assert bench.renewals.renew(delivery, LEASE) == Renewed(START + 17.0)
    bench.time.now = START + 16.0
    ask(bench, delivery)
    assert len(bench.thread_pool.calls) == 2
    bench.thread_pool.deliver(0)
    ask(bench, delivery)  # the next one, with the token that came
    bench.thread_pool.deliver(2)
    assert bench.service.asked[-1][2] == "token-1"
    assert isinstance(bench.renewals.collect(delivery), Renewed)


UNSURE = "unsure"
HELD = "held"

TABLE = [
    # how the first ends, how the second does, what the answers say in the end, the deadline
    (OK, "refused", Renewed(START + 17.0), HELD),
    ("refused", OK, Renewed(START + 17.75), HELD),
    (OK, UNSENT, Renewed(START + 17.0), HELD),
    (UNSENT, OK, Renewed(START + 17.75), HELD),
    (OK, MISSED, Renewed(START + 17.0), HELD),
    (MISSED, OK, Renewed(START + 17.75), HELD),
    (LOST, "refused", VANISHED, UNSURE),
    ("refused", LOST, VANISHED, UNSURE),
    (MISSED, MISSED, VANISHED, UNSURE),
    (LOST, UNSENT, VANISHED, UNSURE),
    (UNSENT, LOST, VANISHED, UNSURE),
    (LOST, BUSY, VANISHED, UNSURE),
    (BUSY, LOST, VANISHED, UNSURE),
    (MISSED, UNSENT, VANISHED, UNSURE),
    (UNSENT, BUSY, None, HELD),
]


@pytest.mark.parametrize("arrival", [(0, 1), (1, 0)], ids=["in order", "crossed"])
@pytest.mark.parametrize(("first", "second", "said", "state"), TABLE)
def test_two_requests_in_flight(bench, first, second, said, state, arrival):
    """The one that is not refused reaches the service first; their answers come as they like."""
    delivery = two(bench)
    order = (0, 1) if first != "refused" else (1, 0)
    for number in order:
        fault = (first, second)[number]
        bench.service.faults.append(OK if fault == "refused" else fault)
        bench.thread_pool.carry_out(number)
    answer = outcome_of(bench, delivery, *arrival)
    pending = bench.renewals.finish(delivery, delivery.deadline)
    stored = bench.service.messages["m-0"]
    if state == HELD:
        assert pending is None
        assert delivery.token == stored.token
    if said is None:
        assert isinstance(answer, Unknown)
        assert answer.untouched
    else:
        assert answer == said
    assert delivery.deadline <= stored.visible_at
    assert delivery.attempts == []


@pytest.mark.parametrize("one", ["in time", "late"])
def test_with_one_answer_still_to_come_the_token_is_not_used(bench, one):
    """Whatever the other said, but for the one that brings the token."""
    delivery = two(bench)
    bench.thread_pool.carry_out(0)
    bench.thread_pool.deliver(1)  # refused: the first has worked
    assert bench.renewals.collect(delivery) == Renewed(START + 17.0)
    assert delivery.token == "token-0"
    assert bench.renewals.finish(delivery, bench.time.now) == LATE
    if one == "in time":
        bench.thread_pool.deliver(0)
        assert bench.renewals.finish(delivery, bench.time.now + 1.0) is None
        assert delivery.token == "token-1"
        assert delivery.deadline == START + 17.0
    else:
        assert bench.renewals.finish(delivery, START + 12.0) == LATE
        assert bench.time.now == START + 12.0


def test_both_refused_means_that_another_worker_has_it(bench):
    delivery = two(bench)
    bench.service.messages["m-0"].token = "another worker's"
    assert outcome_of(bench, delivery, 0, 1) == GONE
    assert bench.renewals.finish(delivery, delivery.deadline) is None


def test_a_refusal_past_the_deadline_proves_nothing_of_the_other_request(bench):
    delivery = two(bench)
    bench.service.messages["m-0"].token = "another worker's"
    bench.time.now = START + 10.0
    bench.thread_pool.deliver(0)
    assert bench.renewals.collect(delivery) == GONE


def test_past_the_deadline_a_refusal_is_a_loss_whatever_broke_before(bench):
    delivery = two(bench)
    bench.service.faults.append(LOST)
    bench.thread_pool.deliver(0)
    bench.renewals.collect(delivery)
    bench.time.now = START + 10.0
    bench.thread_pool.deliver(1)
    assert bench.renewals.collect(delivery) == GONE


def test_an_answer_that_belies_the_refusal_of_the_other_leaves_the_lease_unknown(bench):
    delivery = two(bench)
    bench.thread_pool.carry_out(1)
    bench.thread_pool.outcomes[1] = (None, bench.failure(BUSY))
    bench.thread_pool.deliver(0)
    assert bench.renewals.collect(delivery) == Renewed(START + 17.75)
    bench.thread_pool.deliver(1)
    assert bench.renewals.collect(delivery) == VANISHED


def test_a_refusal_just_before_the_deadline_confirms_the_other_request(bench):
    delivery = two(bench)
    bench.thread_pool.carry_out(1)
    bench.time.now = START + 9.999
    bench.thread_pool.deliver(0)
    assert bench.renewals.collect(delivery) == Renewed(START + 17.75)


def test_after_a_doubt_a_third_requests_refusal_lengthens_nothing(bench):
    """The one that broke may have worked; then the lease ends earlier than the second would say."""
    delivery = two(bench)
    bench.service.faults.append(LOST)
    bench.thread_pool.deliver(0)
    assert bench.renewals.collect(delivery) is None
    bench.time.now = START + 9.0
    ask(bench, delivery)
    assert len(bench.thread_pool.calls) == 3
    bench.thread_pool.carry_out(1)
    bench.thread_pool.deliver(2)
    assert bench.renewals.collect(delivery) is None
    assert delivery.deadline == START + 10.0
    bench.thread_pool.deliver(1)
    assert bench.renewals.collect(delivery) == VANISHED


def test_a_token_that_arrives_ends_the_doubt(bench):
    delivery = two(bench)
    bench.service.faults.append(MISSED)
    bench.thread_pool.deliver(0)
    bench.thread_pool.deliver(1)
    assert isinstance(bench.renewals.collect(delivery), Renewed)
    bench.service.faults.append(BUSY)
    ask(bench, delivery)
    answer = outcome_of(bench, delivery, 2)
    assert isinstance(answer, Unknown)
    assert answer.untouched
    bench.service.messages["m-0"].token = "another worker's"
    ask(bench, delivery)
    assert outcome_of(bench, delivery, 3) == GONE


def test_a_settlement_waits_for_the_token_and_only_as_long_as_it_may(bench, monkeypatch):
    delivery = two(bench)
    assert bench.renewals.finish(delivery, START + 9.0) == LATE
    assert bench.time.now == START + 9.0
    bench.service.faults.append(LOST)
    bench.thread_pool.carry_out(0)
    bench.thread_pool.deliver(0)
    assert bench.renewals.finish(delivery, START + 9.5) == LATE
    bench.thread_pool.deliver(1)
    assert bench.renewals.finish(delivery, START + 10.0) == VANISHED


def test_finishing_tells_of_a_loss(bench):
    delivery = bench.delivery()
    ask(bench, delivery)
    bench.service.messages["m-0"].token = "another worker's"
    bench.thread_pool.deliver(0)
    assert bench.renewals.finish(delivery, delivery.deadline) == GONE


def test_finishing_without_a_renewal_is_done(bench):
    delivery = bench.delivery()
    assert bench.renewals.finish(delivery, START) is None
    assert bench.waited == []


# -- every course of two requests --------------------------------------------------------------


COURSES = [
    (faults, effects, arrival, seconds, pause)
    for faults in itertools.product(FAULTS, FAULTS)
    for effects in ((0, 1), (1, 0))
    for arrival in ((0, 1), (1, 0))
    for seconds in ((LEASE, LEASE), (LEASE, 1.0), (1.0, LEASE), (2.0, 2.0))
    for pause in (0.0, 1.0)
]


@pytest.mark.parametrize("course", range(0, len(COURSES), 50))
def test_whatever_happens_no_lease_is_claimed_longer_than_it_lasts(monkeypatch, course):
    """And none is called lost while it is ours, and a token that is used is the one that holds."""
    for each in COURSES[course : course + 50]:
        follow(queueservice.Bench(monkeypatch), *each)


def follow(bench, faults, effects, arrival, seconds, pause):
    delivery = bench.delivery(lease=LEASE)
    stored = bench.service.messages["m-0"]
    bench.time.now = START + 7.0
    assert bench.renewals.renew(delivery, seconds[0]) == LATE
    if bench.renewals.renew(delivery, seconds[1]) == ENDED:
        return
    if len(bench.thread_pool.calls) < 2:
        return
    for number in effects:
        bench.service.faults.append(faults[number])
        bench.thread_pool.carry_out(number)
        bench.time.now += pause / 4
    said = []
    for number in arrival:
        bench.thread_pool.deliver(number)
        bench.time.now += pause / 4
        said.append(bench.renewals.collect(delivery))
        if bench.time.now < delivery.deadline:
            assert delivery.deadline <= stored.visible_at
        if bench.time.now < stored.visible_at and bench.time.now < delivery.deadline:
            assert not isinstance(said[-1], Lost)
    pending = bench.renewals.finish(delivery, bench.time.now)
    settled = [each for each in said if each is not None]
    unknown = any(isinstance(each, Unknown) and not each.untouched for each in settled)
    if pending is None and settled and not unknown and not isinstance(settled[-1], Lost):
        assert delivery.token == stored.token
