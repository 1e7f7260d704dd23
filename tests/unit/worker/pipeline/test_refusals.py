"""Deliveries that fail alone: how often they are tried, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from pipelinebench import Bench, Make

from aztask.errors import (
    BrokerUnavailable,
    ConfigurationError,
    EncodeError,
    MessageTooLarge,
)
from aztask.queues.lease.state import LeaseEvent, LeaseState
from aztask.settlement import Abandon, Complete, DeadLetter, Resubmit
from aztask.stores.records.base import Outcome, RunKey, State
from aztask.worker.pipeline.settling import Refusals, text_of
from aztask.worker.pipeline.work import Stage, WorkItem

ERROR = ValueError("this one")
TEXT = "ValueError: this one"
DEAD = DeadLetter("unprocessable", TEXT)


def refusals(bench: Bench) -> Refusals:
    return bench.pipeline._refusals


def failing(bench: Bench, **more: Any) -> WorkItem:
    """A retry that the store has recorded, or not."""
    (item,) = bench.claimed("a")
    outcome = Outcome(
        State.RETRYING, Resubmit(1.0), b"v", "OSError", "disk full", "trace", 5.0, 0.5
    )
    item.decide(outcome.settlement, outcome, **more)
    return item


# -- claiming ----------------------------------------------------------------------------------


def test_what_cannot_be_claimed_is_tried_three_times_and_then_dead(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    for tries in (1, 2):
        refusals(bench).unclaimable(item, ERROR)
        assert (item.tries, item.decided) == (tries, None)
    refusals(bench).unclaimable(item, ERROR)
    assert (item.settlement, item.outcome) == (DEAD, None)


def test_a_claim_that_works_counts_anew(make: Make) -> None:
    bench = make()
    bench.faults.start["a"] = ERROR
    (item,) = bench.claimed("a")
    assert item.tries == 1
    bench.faults.start.clear()
    bench.pipeline.claim([item])
    assert (item.tries, item.stage) == (0, Stage.READY)


# -- recording and settling --------------------------------------------------------------------


def test_what_cannot_be_finished_is_tried_three_times_and_then_dead(make: Make) -> None:
    bench = make()
    item = failing(bench)
    for tries in (1, 2):
        item.lease.change(LeaseEvent.SETTLE)
        refusals(bench).unfinishable(item, ERROR)
        assert (item.tries, item.settlement) == (tries, Resubmit(1.0))
        assert item.lease.state is LeaseState.HELD, "its settlement was begun"
    refusals(bench).unfinishable(item, ERROR)
    assert (item.tries, item.stage) == (0, Stage.DECIDED)
    assert item.decided is not None
    assert item.decided.refused
    assert not item.decided.recorded
    assert item.settlement == DEAD
    # the task's own error is kept; its value, which may be the cause, is not
    assert item.outcome == Outcome(
        State.FAILED, DEAD, None, "OSError", "disk full", "trace", 5.0, 0.5
    )


def test_without_an_error_of_its_own_the_reason_stands_for_it(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    bench.succeed([item])
    for _ in range(3):
        refusals(bench).unfinishable(item, ERROR)
    assert item.outcome is not None
    assert (item.outcome.error_type, item.outcome.error) == ("unprocessable", TEXT)


def test_without_an_outcome_it_is_dead_all_the_same(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    item.decide(Complete())
    for _ in range(3):
        refusals(bench).unfinishable(item, ERROR)
    assert (item.settlement, item.outcome, item.tries) == (DEAD, None, 0)
    assert item.decided is not None
    assert item.decided.refused


def test_one_that_cannot_be_read_is_named_by_its_position(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.opened = None
    item.decide(DeadLetter("undecodable"))
    refusals(bench).unfinishable(item, ERROR)
    assert str(item.delivery.position) in caplog.text


def test_a_dead_letter_that_fails_three_times_too_is_left_to_its_lease(make: Make) -> None:
    bench = make()
    item = failing(bench)
    for _ in range(5):
        refusals(bench).unfinishable(item, ERROR)
        assert item.stage is Stage.DECIDED
    refusals(bench).unfinishable(item, ERROR)
    assert (item.stage, item.settled) == (Stage.ENDED, False)
    assert item.notes == [("settle_failed", TEXT)]


# -- what was recorded stays as it is ----------------------------------------------------------


@pytest.mark.parametrize("repeated", [True, False])
def test_of_a_recorded_retry_the_retry_is_recorded_as_failed(make: Make, repeated: bool) -> None:
    bench = make()
    item = failing(bench, recorded=True, repeated=repeated)
    before = item.outcome
    for _ in range(3):
        refusals(bench).unfinishable(item, ERROR)
    decided = item.decided
    assert decided is not None
    assert (decided.settlement, decided.outcome) == (DEAD, before), "its own record stays"
    assert (decided.recorded, decided.repeated, decided.refused) == (True, repeated, True)
    (run,) = [each for each in bench.app.results.history("a") if each.key.hop == 1]
    assert (run.key, run.task, run.queue) == (RunKey("a", 0, 1), "shop.count", "default")
    assert (run.state, run.worker) == (State.FAILED, "")
    assert run.outcome == Outcome(
        State.FAILED, DEAD, None, "OSError", "disk full", "trace", 5.0, 0.5
    )
    (first,) = [each for each in bench.app.results.history("a") if each.key.hop == 0]
    assert first.state is State.STARTED


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), ConfigurationError("no rights")])
def test_while_the_store_is_unreachable_the_failure_is_recorded_later(
    make: Make, error: Exception
) -> None:
    bench = make()
    item = failing(bench, recorded=True)
    bench.faults.bury["a"] = error
    for _ in range(3):
        refusals(bench).unfinishable(item, ERROR)
    assert item.settlement == Resubmit(1.0), "it is not a dead letter before that is recorded"
    assert item.tries == 4, "the next try comes later"
    bench.faults.bury.clear()
    refusals(bench).unfinishable(item, ERROR)
    assert (item.settlement, item.tries) == (DEAD, 0)


def test_without_a_store_there_is_nothing_to_record(make: Make) -> None:
    bench = make(results=False)
    item = failing(bench, recorded=True)
    for _ in range(3):
        refusals(bench).unfinishable(item, ERROR)
    assert item.settlement == DEAD


# -- retries that the broker would refuse ------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [(MessageTooLarge("3 MB"), "retry-too-large"), (EncodeError("odd"), "unprocessable")],
)
def test_a_retry_that_the_broker_would_refuse_is_a_dead_letter(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    bench = make()
    item = failing(bench)

    def check(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(bench.app.broker, "check", check)
    assert refusals(bench).sendable(item) is True
    assert isinstance(item.settlement, DeadLetter)
    assert item.settlement.reason == reason
    assert str(error) in item.settlement.description
    assert item.outcome is not None
    assert item.outcome.state is State.FAILED


def test_a_recorded_one_waits_until_its_failure_is_recorded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    item = failing(bench, recorded=True)
    bench.faults.bury["a"] = BrokerUnavailable("away")

    def check(*_: Any, **__: Any) -> None:
        raise MessageTooLarge("3 MB")

    monkeypatch.setattr(bench.app.broker, "check", check)
    assert refusals(bench).sendable(item) is False
    assert (item.settlement, item.tries) == (Resubmit(1.0), 1)
    bench.pipeline.finish([item])
    assert not item.settled, "neither the retry nor a dead letter was sent"
    bench.faults.bury.clear()
    assert refusals(bench).sendable(item) is True
    assert isinstance(item.settlement, DeadLetter)


@pytest.mark.parametrize("how", [Complete(), Abandon(), DeadLetter("why")])
def test_what_sends_nothing_can_be_settled(make: Make, how: Any) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    item.decide(how)
    assert refusals(bench).sendable(item) is True
    assert item.settlement == how


def test_the_recorded_text_is_one_line_and_short() -> None:
    assert text_of(KeyError("row")) == "KeyError: 'row'"
    assert len(text_of(ValueError("x" * 5000))) <= 520
    assert "\n" not in text_of(ValueError("a\nb"))
