"""Settlements on a Storage queue: which requests they are, and what their answers mean."""

from __future__ import annotations

import pytest
import queueservice
from queueservice import BROKEN, BUSY, DENIED, LOST, MISSED, OK, UNSENT

from aztask.errors import CapabilityError, ConfigurationError, MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.storagequeue.settling import ENDED, LATE, LONGEST_SETTLING, VANISHED, check
from aztask.queues.storagequeue.wire import SEND_LIMIT, read_text, text_of
from aztask.settlement import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Release,
    Resubmit,
    with_envelope,
)

make, bench = queueservice.make, queueservice.bench
LEASE = 10.0
START = 1000.0
CLONE = Envelope(b"clone", {"hop": 1}, "t:0:1")


def resubmit(delay=0.0):
    return with_envelope(Resubmit(delay), CLONE, delay)


ALL = (Complete(), Abandon(), Release(), DeadLetter("why", "because"), resubmit(5.0))


def settled(bench, delivery, how):
    """As the receiver does."""
    with delivery.lock:
        answer = bench.settling.settle(delivery, how)
        delivery.settled = isinstance(answer, Settled)
        return answer


def renewing(bench, delivery, seconds=LEASE):
    """A renewal of it has reached the service; its answer is to come."""
    bench.renewals.renew(delivery, seconds)
    bench.thread_pool.carry_out(len(bench.thread_pool.calls) - 1)


# -- what each one asks for --------------------------------------------------------------------


def test_a_completion_deletes_the_message(bench):
    delivery = bench.delivery()
    assert settled(bench, delivery, Complete()) == Settled()
    assert bench.service.messages == {}
    assert bench.service.asked == [("delete", "m-0", "token-0", 5.0)]
    assert delivery.removed


@pytest.mark.parametrize("how", [Abandon(), Release()])
def test_what_is_given_back_is_visible_at_once_and_unchanged(bench, how):
    delivery = bench.delivery(text="as it was")
    assert settled(bench, delivery, how) == Settled()
    stored = bench.service.messages["m-0"]
    assert (stored.visible_at, stored.text) == (START, "as it was")


def test_a_dead_letter_is_stored_with_its_reason_before_the_original_is_deleted(bench):
    delivery = bench.delivery()
    bench.service.faults.append(DENIED)
    assert isinstance(settled(bench, delivery, DeadLetter("why", "because")), Unknown)
    (dead,) = bench.poison.messages.values()
    assert read_text(dead.text).dead == DeadLetter("why", "because")
    assert read_text(dead.text).envelope == Envelope(b"body")
    assert dead.visible_at == START
    assert list(bench.service.messages) == ["m-0"]
    assert settled(bench, delivery, DeadLetter("why", "because")) == Settled()
    assert bench.service.messages == {}


@pytest.mark.parametrize("offset", [0.0, 3600.0, -3600.0])
def test_a_resubmission_changes_the_message_in_place_and_is_due_by_the_services_clock(make, offset):
    bench = make(offset=offset)
    delivery = bench.delivery()
    assert settled(bench, delivery, resubmit(5.0)) == Settled()
    stored = bench.service.messages["m-0"]
    written = read_text(stored.text)
    assert written.envelope == CLONE
    assert written.due == START + offset + 5.0
    assert stored.visible_at == START + 5.0
    assert bench.living.messages == {}


def test_a_resubmission_without_delay_has_no_due_time(make):
    bench = make(offset=3600.0)
    settled(bench, bench.delivery(), resubmit())
    stored = bench.service.messages["m-0"]
    assert (read_text(stored.text).due, stored.visible_at) == (None, START)


def test_a_replayed_dead_letter_is_put_into_the_queue_and_then_deleted(make):
    bench = make(dead_letter=True, offset=60.0)
    delivery = bench.delivery()
    assert settled(bench, delivery, resubmit(5.0)) == Settled()
    (again,) = bench.living.messages.values()
    assert read_text(again.text).envelope == CLONE
    assert read_text(again.text).due == START + 65.0
    assert again.visible_at == START + 5.0
    assert bench.service.messages == {}


@pytest.mark.parametrize("fault", [UNSENT, LOST, MISSED, BUSY])
def test_a_dead_letter_whose_deletion_fails_twice_is_stored_once(bench, fault):
    delivery = bench.delivery(lease=0.3)  # no time for a second try
    dead = DeadLetter("why")
    for _ in range(2):
        bench.service.faults.append(fault)
        answer = settled(bench, delivery, dead)
        if fault == LOST and isinstance(answer, Settled):
            break
        assert isinstance(answer, Unknown)
    assert settled(bench, delivery, dead) == Settled()
    assert len(bench.poison.messages) == 1
    assert bench.service.messages == {}


def test_a_replay_whose_deletion_fails_twice_is_put_back_once(make):
    bench = make(dead_letter=True)
    delivery = bench.delivery(lease=0.3)
    for _ in range(2):
        bench.service.faults.append(UNSENT)
        assert isinstance(settled(bench, delivery, resubmit()), Unknown)
    assert settled(bench, delivery, resubmit()) == Settled()
    assert len(bench.living.messages) == 1
    assert bench.service.messages == {}


@pytest.mark.parametrize("fault", [DENIED, UNSENT])
def test_while_the_copy_cannot_be_stored_the_original_stays(make, fault):
    for dead_letter, how in ((False, DeadLetter("why")), (True, resubmit())):
        bench = make(dead_letter=dead_letter)
        delivery = bench.delivery(lease=0.3)
        bench.poison.faults.append(fault)
        bench.living.faults.append(fault)
        answer = settled(bench, delivery, how)
        assert isinstance(answer, Unknown)
        assert "could not be" in answer.reason
        assert bench.service.done == []
        assert settled(bench, delivery, how) == Settled()
        assert bench.service.messages == {}


def test_a_copy_that_certainly_was_not_stored_is_sent_again(make):
    for dead_letter, how in ((False, DeadLetter("why")), (True, resubmit())):
        bench = make(dead_letter=dead_letter)
        copies = bench.living if dead_letter else bench.poison
        copies.faults.extend([UNSENT, BUSY])
        assert settled(bench, bench.delivery(), how) == Settled()
        assert len(copies.messages) == 1


def test_a_clone_may_be_somewhat_larger_than_what_is_sent(bench):
    """The headers of a retry have grown by its counts."""
    envelope = Envelope(b"x" * (SEND_LIMIT // 4 * 3))
    with pytest.raises(MessageTooLarge):
        text_of(envelope)
    how = with_envelope(Resubmit(), envelope, 0.0)
    assert settled(bench, bench.delivery(), how) == Settled()


def test_what_cannot_be_written_leaves_the_original(bench, caplog):
    wrong = with_envelope(Resubmit(), Envelope(b"x", session="s"), 0.0)
    answer = settled(bench, bench.delivery(), wrong)
    assert isinstance(answer, Unknown)
    assert "session" in answer.reason
    assert bench.service.asked == []
    assert "m-0 of queue q was not settled" in caplog.text


def test_what_can_never_be_carried_out_is_refused_before_anything_is():
    with pytest.raises(CapabilityError, match="cannot defer"):
        check(Defer())
    with pytest.raises(ConfigurationError, match="needs its clone"):
        check(Resubmit())
    for fine in ALL:
        check(fine)


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [*ALL, "replay"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_request_without_an_answer_is_repeated_and_happens_once(make, how, fault):
    bench = make(dead_letter=how == "replay")
    how = resubmit() if how == "replay" else how
    delivery = bench.delivery()
    bench.service.faults.append(fault)
    assert settled(bench, delivery, how) == Settled()
    assert len(bench.service.done) == 1
    assert delivery.removed
    assert delivery.unsure
    assert bench.slept == [0.05]


@pytest.mark.parametrize("fault", [UNSENT, BUSY])
def test_a_refusal_after_what_certainly_did_not_happen_is_a_loss(bench, fault):
    delivery = bench.delivery()
    bench.service.faults.append(fault)
    bench.service.messages["m-0"].token = "another worker's"
    answer = settled(bench, delivery, Complete())
    assert isinstance(answer, Lost)
    assert "PopReceiptMismatch" in answer.reason
    assert len(bench.service.asked) == 2
    assert not delivery.removed


@pytest.mark.parametrize("how", ALL)
def test_a_message_that_another_worker_took_is_lost_and_untouched(bench, how):
    delivery = bench.delivery()
    stored = bench.service.messages["m-0"]
    stored.token = "another worker's"
    assert isinstance(settled(bench, delivery, how), Lost)
    assert bench.service.messages == {"m-0": stored}
    assert bench.service.done == []
    assert bench.slept == []


def test_a_refused_credential_is_not_repeated(bench, caplog):
    bench.service.faults.append(DENIED)
    answer = settled(bench, bench.delivery(), Complete())
    assert isinstance(answer, Unknown)
    assert "credential" in answer.reason
    assert len(bench.service.asked) == 1
    assert answer.reason in caplog.text


def test_tries_go_on_while_the_lease_lasts_with_pauses_that_double(bench):
    delivery = bench.delivery(lease=LEASE)
    bench.service.faults.extend([UNSENT] * 100)
    answer = settled(bench, delivery, Complete())
    assert isinstance(answer, Unknown)
    assert "unsent" in answer.reason
    assert bench.slept[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert START + 8.5 < bench.time.now < delivery.deadline
    assert settled(bench, delivery, Complete()) != Settled()
    bench.service.faults.clear()
    assert settled(bench, delivery, Complete()) == Settled()


def test_of_a_long_lease_half_a_minute_is_tried(bench):
    delivery = bench.delivery(lease=1000.0)
    bench.service.faults.extend([UNSENT] * 1000)
    assert isinstance(settled(bench, delivery, Complete()), Unknown)
    assert LONGEST_SETTLING == 30.0
    assert START + 28.5 < bench.time.now < START + 30.0


def test_half_a_minute_counts_from_the_token(bench):
    delivery = bench.delivery(lease=1000.0)
    renewing(bench, delivery, 1000.0)
    bench.service.faults.extend([UNSENT] * 1000)
    waits = []

    def wait(futures, timeout, when):
        waits.append(timeout)
        bench.time.now += 20.0
        bench.thread_pool.deliver(0)

    queueservice.storage_renewal.wait = wait
    assert isinstance(settled(bench, delivery, Complete()), Unknown)
    assert waits == [30.0]
    assert bench.time.now > START + 21.0 + 28.5


@pytest.mark.parametrize(("left", "answer"), [(0.001, Settled()), (0.0, ENDED), (-5.0, ENDED)])
def test_from_the_deadline_on_nothing_is_settled(bench, left, answer):
    delivery = bench.delivery(lease=LEASE)
    bench.time.now = delivery.deadline - left
    assert settled(bench, delivery, Complete()) == answer
    assert len(bench.service.asked) == (1 if answer == Settled() else 0)


def test_what_is_removed_already_is_settled_without_a_request(bench):
    delivery = bench.delivery()
    delivery.removed = True
    bench.time.now += 100.0
    assert settled(bench, delivery, Complete()) == Settled()
    assert bench.service.asked == []


# -- a renewal under way -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ALL)
def test_a_settlement_uses_the_token_that_a_pending_renewal_brings(bench, how):
    delivery = bench.delivery()
    renewing(bench, delivery)
    bench.thread_pool.deliver(0)
    assert settled(bench, delivery, how) == Settled()
    assert [each[2] for each in bench.service.asked] == ["token-0", "token-1"]


@pytest.mark.parametrize("how", ALL)
def test_while_a_renewal_is_pending_nothing_is_settled(bench, how):
    delivery = bench.delivery()
    bench.time.now += 3.0
    renewing(bench, delivery)
    assert settled(bench, delivery, how) == LATE
    assert len(bench.service.asked) == 1
    assert bench.poison.asked == []
    assert bench.time.now == START + 10.0, "it waited until the deadline"
    bench.thread_pool.deliver(0)
    bench.renewals.collect(delivery)
    assert settled(bench, delivery, how) == Settled()


@pytest.mark.parametrize("how", ALL)
def test_when_the_token_vanished_with_an_answer_nothing_is_settled(bench, how):
    delivery = bench.delivery()
    bench.service.faults.append(LOST)
    renewing(bench, delivery)
    bench.thread_pool.deliver(0)
    assert settled(bench, delivery, how) == VANISHED
    assert len(bench.service.asked) == 1
    assert bench.poison.asked == []


def test_after_a_renewal_that_certainly_did_not_happen_the_old_token_is_used(bench):
    delivery = bench.delivery()
    bench.service.faults.append(BUSY)
    renewing(bench, delivery)
    bench.thread_pool.deliver(0)
    assert settled(bench, delivery, Complete()) == Settled()


def test_a_settlement_in_doubt_and_then_a_refused_renewal_is_settled(bench):
    delivery = bench.delivery(lease=0.4)
    bench.service.faults.extend([LOST])
    bench.service.takes = 0.1
    assert isinstance(settled(bench, delivery, Complete()), Unknown)
    renewing(bench, delivery)
    bench.thread_pool.deliver(0)
    bench.renewals.collect(delivery)
    assert settled(bench, delivery, Complete()) == Settled()


# -- batches -----------------------------------------------------------------------------------


def batch(bench, count, how=Complete(), lease=10.0):
    return [(bench.delivery(f"m-{n}", lease=lease), how) for n in range(count)]


def all_released(pairs):
    return not any(delivery.lock.locked() for delivery, _ in pairs)


def test_a_batch_is_deleted_side_by_side(bench):
    pairs = batch(bench, 3)
    assert bench.settling.complete_all(pairs) == [Settled()] * 3
    assert bench.service.messages == {}
    assert all(delivery.settled and delivery.removed for delivery, _ in pairs)
    assert bench.service.batch == (queueservice.storage_delivery.CONNECTIONS, 5.0)
    assert all_released(pairs)


def test_of_a_batch_each_member_has_its_own_answer(bench):
    pairs = batch(bench, 6)
    bench.service.messages["m-1"].token = "another worker's"
    bench.service.faults.extend([OK, OK, LOST, UNSENT, DENIED, OK])
    answers = bench.settling.complete_all(pairs)
    assert [type(each) for each in answers] == [
        Settled, Lost, type(None), type(None), Unknown, Settled,
    ]  # fmt: skip
    assert [delivery.settled for delivery, _ in pairs] == [True, False, False, False, False, True]
    assert [delivery.unsure for delivery, _ in pairs] == [False, False, True, False, False, False]
    assert list(bench.service.messages) == ["m-1", "m-3", "m-4"]
    # what is left is settled one by one, and remembers what may have happened
    assert settled(bench, *pairs[2]) == Settled()
    assert settled(bench, *pairs[3]) == Settled()


def test_only_completions_are_deleted_side_by_side(bench):
    pairs = [(bench.delivery(f"m-{n}"), how) for n, how in enumerate((*ALL, Complete()))]
    answers = bench.settling.complete_all(pairs)
    assert answers == [Settled(), None, None, None, None, Settled()]
    assert len(bench.service.done) == 2
    assert all_released(pairs)


@pytest.mark.parametrize(
    "make_busy",
    [
        lambda bench, delivery: setattr(delivery, "settled", True),
        lambda bench, delivery: setattr(delivery, "removed", True),
        renewing,
        lambda bench, delivery: setattr(delivery, "deadline", bench.time.now + 1.999),
        lambda bench, delivery: delivery.lock.acquire(),
    ],
    ids=["settled", "removed", "being renewed", "about to end", "in other hands"],
)
def test_a_member_that_needs_more_than_one_try_is_left_to_settle(bench, make_busy):
    """Above all one that is being renewed: its token is about to change."""
    pairs = batch(bench, 3)
    make_busy(bench, pairs[1][0])
    asked = len(bench.service.asked)
    assert bench.settling.complete_all(pairs) == [Settled(), None, Settled()]
    assert [each[1] for each in bench.service.asked[asked:]] == ["m-0", "m-2"]


def test_a_lease_of_two_seconds_more_is_enough_for_a_batch(bench):
    pairs = batch(bench, 2)
    pairs[0][0].deadline = START + 2.0
    assert bench.settling.complete_all(pairs) == [Settled()] * 2
    assert bench.service.batch[1] == 1.0, "the shortest lease sets the time-out"


def test_a_single_completion_is_no_batch(bench):
    pairs = batch(bench, 1)
    assert bench.settling.complete_all(pairs) == [None]
    assert bench.service.asked == []
    assert all_released(pairs)


def test_behind_a_proxy_everything_is_settled_one_by_one(bench, monkeypatch):
    monkeypatch.setattr(bench.service, "delete_all", lambda *_, **__: None)
    pairs = batch(bench, 3)
    assert bench.settling.complete_all(pairs) == [None] * 3
    assert not any(delivery.settled for delivery, _ in pairs)


def test_an_error_in_a_batch_lets_go_of_every_member(bench, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("odd")

    monkeypatch.setattr(bench.service, "delete_all", fail)
    pairs = batch(bench, 3)
    with pytest.raises(RuntimeError, match="odd"):
        bench.settling.complete_all(pairs)
    assert all_released(pairs)


def test_what_comes_too_late_for_its_deadline_is_not_sent(bench):
    pairs = batch(bench, 2)
    pairs[1][0].deadline = START + 3.0
    bench.service.takes = 3.0
    answers = bench.settling.complete_all(pairs)
    assert answers == [Settled(), None]
    assert list(bench.service.messages) == ["m-1"]


def test_a_batch_of_20_000_with_one_stale_member(bench):
    pairs = batch(bench, 20_000, lease=600.0)
    bench.service.messages["m-777"].token = "another worker's"
    answers = bench.settling.complete_all(pairs)
    assert isinstance(answers.pop(777), Lost)
    assert answers == [Settled()] * 19_999
    assert list(bench.service.messages) == ["m-777"]


def test_dead_letters_of_a_batch_keep_their_own_reasons(bench):
    reasons = [DeadLetter(f"reason {n}", f"because of {n}") for n in range(5)]
    for n, reason in enumerate(reasons):
        assert settled(bench, bench.delivery(f"m-{n}"), reason) == Settled()
    assert [read_text(each.text).dead for each in bench.poison.messages.values()] == reasons
