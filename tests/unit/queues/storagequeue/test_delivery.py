"""Requests for one message: their time-outs, and how long they are repeated."""

import pytest
import queueservice
from queueservice import BUSY, DENIED, LOST, OK

from aztask.queues.storagequeue.delivery import (
    LONGEST_READ,
    SHORTEST_READ,
    FailedRequest,
    persist,
    reading_time,
)
from aztask.queues.storagequeue.errors import Effect

bench, make = queueservice.bench, queueservice.make


@pytest.mark.parametrize(
    ("left", "seconds"),
    [(10.0, 5.0), (1000.0, LONGEST_READ), (0.1, SHORTEST_READ), (-5.0, SHORTEST_READ)],
)
def test_another_try_fits_the_lease(left, seconds):
    assert reading_time(100.0 + left, 100.0) == seconds


def tried(bench, *faults, deadline=10.0, stop=False):
    """Puts with these faults: the last failure, and how many requests there were."""
    bench.service.faults.extend(faults)
    failure = persist(
        lambda seconds: bench.requests.put("text", 0.0, seconds),
        bench.time.now + deadline,
        bench.clock,
        lambda failure: stop,
    )
    return failure, len(bench.service.asked)


def test_a_request_is_repeated_until_it_succeeds(bench):
    assert tried(bench, BUSY, LOST, OK) == (None, 3)
    assert bench.slept == [0.05, 0.1]


def test_a_refusal_ends_the_tries(bench):
    failure, count = tried(bench, BUSY, DENIED, OK)
    assert (failure.effect, count) == (Effect.REFUSED, 2)


def test_the_caller_can_end_the_tries(bench):
    failure, count = tried(bench, BUSY, OK, stop=True)
    assert (failure.effect, count) == (Effect.NONE, 1)


def test_the_tries_end_with_the_lease(bench):
    failure, _ = tried(bench, *[BUSY] * 100)
    assert failure.effect is Effect.NONE
    assert bench.time.now < 1010.0
    assert max(bench.slept) == 1.0


def test_a_failed_request_says_what_is_known(bench):
    delivery = bench.delivery()
    delivery.token = "stale"
    with pytest.raises(FailedRequest, match="PopReceiptMismatch") as failed:
        bench.requests.delete(delivery, 1.0)
    assert failed.value.failure.gone


def test_past_its_deadline_nothing_is_deleted(bench):
    late, held = bench.delivery("m-1", lease=1.0), bench.delivery("m-2")
    bench.time.now += 1.0
    first, second = bench.requests.delete_all([late, held], 1.0)
    assert first.effect is Effect.NONE
    assert second is None
    assert list(bench.service.messages) == ["m-1"]


def test_a_hidden_message_has_a_new_token(bench):
    delivery = bench.delivery()
    token = bench.requests.hide(delivery, 5.2, 1.0, "new")
    assert bench.service.messages["m-0"].text == "new"
    assert bench.service.messages["m-0"].token == token
    assert bench.service.messages["m-0"].visible_at == bench.time.now + 6.0
