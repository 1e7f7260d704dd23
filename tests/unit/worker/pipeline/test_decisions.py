"""What is decided about a delivery, before its run and after it, at the very boundaries."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pipelinebench import BadBroker, Bench, Make

from aztask import RetryPolicy
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Hold, Resubmit
from aztask.stores.records.base import (
    Cancelled,
    Outcome,
    Owned,
    OwnedElsewhere,
    Recorded,
    State,
    Unreadable,
)
from aztask.worker.pipeline.decisions import Decisions
from aztask.worker.pipeline.work import Stage, WorkItem, message_of

NOW = 1_000_000.0


def verdicts(bench: Bench) -> Decisions:
    return bench.pipeline.decisions


def running(bench: Bench, **changes: Any) -> WorkItem:
    (item,) = bench.claimed("a")
    item.sent()
    assert item.run is not None
    item.run.duration = 2.5
    if changes:
        item.rewrite(**changes)
    return item


class Slot:
    """What holds the item's session."""

    def held(self) -> None: ...

    def over(self, item: WorkItem) -> None: ...


# -- before the run: too early -----------------------------------------------------------------


@pytest.mark.parametrize("eta", [None, NOW - 5.0, NOW])
def test_what_is_due_is_not_put_off(make: Make, eta: float | None) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.rewrite(eta=eta)
    assert verdicts(bench).early(item) is False
    assert item.decided is None


def test_what_came_too_early_is_put_off_in_the_broker(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.rewrite(eta=NOW + 0.5)
    assert verdicts(bench).early(item) is True
    assert item.settlement == Resubmit(0.5, counted=False)
    assert item.outcome is None, "it did not run: nothing is recorded"
    assert item.decided is not None
    clone = item.decided.clone
    assert clone is not None
    assert (clone.hop, clone.resubmit_count, clone.snooze_count) == (1, 0, 0)


class InPlace(BadBroker):
    """The local broker, declared to change messages in place: as a Storage queue."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, resubmit_in_place=True)


@pytest.mark.parametrize(("kind", "base"), [(BadBroker, 0), (InPlace, 4)])
def test_what_is_put_off_remembers_a_count_that_goes_on(
    make: Make, kind: type[BadBroker], base: int
) -> None:
    bench = make(kind=kind)
    (item,) = bench.items("a")
    item.delivery.delivery_count = 4
    item.rewrite(eta=NOW + 5.0)
    verdicts(bench).early(item)
    assert item.decided is not None
    assert item.decided.clone is not None
    assert item.decided.clone.delivery_base == base


def test_a_foreign_message_that_came_too_early_is_not_claimed(make: Make) -> None:
    bench = make()
    bench.send("a")
    (peeked,) = bench.app.broker.peek("default")
    bench.app.broker.purge("default")
    due = datetime.fromtimestamp(NOW + 5.0, UTC).isoformat()
    headers = {**peeked.envelope.headers, "eta": due}
    bench.app.broker.send("default", [replace(peeked.envelope, headers=headers)])
    (item,) = bench.receive()
    assert item.settlement == Resubmit(5.0, counted=False)
    bench.pipeline.finish([item])
    assert bench.stats() == (0, 0, 1, 0)
    assert bench.states("a") == ["pending"]


# -- before the run: what the store says -------------------------------------------------------


def test_what_has_ended_repeats_its_settlement(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.tries = 2
    outcome = Outcome(State.FAILED, DeadLetter("why", "how"), None, "E", "e")
    verdicts(bench).claimed(item, Recorded(outcome))
    decided = item.decided
    assert decided is not None
    assert (decided.settlement, decided.outcome) == (DeadLetter("why", "how"), outcome)
    assert (decided.recorded, decided.repeated) == (True, True)
    assert (item.tries, item.claimed) == (0, None)


def test_a_copy_whose_run_another_one_owns_is_completed(make: Make) -> None:
    """Not released: it would come again and again, to every worker."""
    bench = make()
    (item,) = bench.items("a")
    verdicts(bench).claimed(item, OwnedElsewhere())
    assert item.decided is not None
    assert (item.settlement, item.outcome, item.claimed) == (Complete(), None, None)
    assert item.stage is Stage.DECIDED


def test_a_damaged_record_is_not_run(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    verdicts(bench).claimed(item, Unreadable("a bad byte"))
    assert item.settlement == DeadLetter("unreadable-record", "a bad byte")
    assert item.outcome is None, "the damaged row is left as it is"


def test_a_cancelled_task_is_completed_and_recorded_so(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    verdicts(bench).claimed(item, Cancelled(3))
    assert item.claimed is not None
    assert item.claimed.starts == 3
    assert item.outcome == Outcome(State.CANCELLED, Complete(), None, "", "", "", NOW, 0.0)


def test_what_is_ours_is_ready(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.tries = 2
    verdicts(bench).claimed(item, Owned(1))
    assert (item.stage, item.tries, item.decided) == (Stage.READY, 0, None)


# -- before the run: reasons not to run --------------------------------------------------------


@pytest.mark.parametrize(("expires", "runs"), [(NOW + 0.001, True), (NOW, False), (None, True)])
def test_what_has_expired_is_completed_without_a_run(
    make: Make, expires: float | None, runs: bool
) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.rewrite(expires=expires)
    verdicts(bench).claimed(item, Owned(1))
    assert (item.stage is Stage.READY) is runs
    if not runs:
        assert item.outcome == Outcome(State.EXPIRED, Complete(), None, "", "", "", NOW, 0.0)


@pytest.mark.parametrize(("starts", "runs"), [(9, True), (10, True), (11, False)])
def test_what_was_started_too_often_is_dead(make: Make, starts: int, runs: bool) -> None:
    bench = make()
    (item,) = bench.items("a")
    verdicts(bench).claimed(item, Owned(starts))
    assert (item.stage is Stage.READY) is runs
    if not runs:
        assert isinstance(item.settlement, DeadLetter)
        assert item.settlement.reason == "delivery-limit"
        assert "10 times" in item.settlement.description
        assert item.outcome is not None
        assert item.outcome.state is State.FAILED
        assert item.outcome.error_type == "delivery-limit"
        assert item.outcome.error == item.settlement.description


def test_what_has_expired_is_not_also_dead(make: Make) -> None:
    bench = make()
    (item,) = bench.items("a")
    item.rewrite(expires=NOW)
    verdicts(bench).claimed(item, Owned(11))
    assert item.settlement == Complete()


# -- before the run: unknown tasks -------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace", "delay"), [(60.0, 6.0), (300.0, 30.0), (3000.0, 30.0), (299.0, 29.9)]
)
def test_an_unknown_task_is_put_off_in_steps(make: Make, grace: float, delay: float) -> None:
    bench = make(known=False, unknown_task_grace=grace)
    (item,) = bench.items("a")
    assert verdicts(bench).unknown(item) == (delay, NOW)
    item.rewrite(unknown_since=NOW - 5.0)
    assert verdicts(bench).unknown(item) == (delay, NOW - 5.0)
    item.rewrite(unknown_since=NOW + 5.0)
    assert verdicts(bench).unknown(item) == (delay, NOW), "otherwise it would wait without end"


@pytest.mark.parametrize(
    ("since", "dead"),
    [(None, False), (NOW - 299.999, False), (NOW - 300.0, True), (0.0, True)],
)
def test_an_unknown_task_is_dead_when_its_grace_is_over(
    make: Make, since: float | None, dead: bool
) -> None:
    bench = make(known=False, unknown_task_grace=300.0)
    (item,) = bench.items("a")
    item.rewrite(unknown_since=since)
    assert (verdicts(bench).unknown(item) is None) is dead


def test_after_its_grace_it_is_dead_lettered_with_the_reason(make: Make) -> None:
    bench = make(known=False)
    (item,) = bench.items("a")
    item.rewrite(unknown_since=NOW - 300.0)
    verdicts(bench)._before_run(item, 1)
    assert isinstance(item.settlement, DeadLetter)
    assert item.settlement.reason == "unknown-task"
    assert "'shop.count' for 300 s" in item.settlement.description
    assert item.outcome is not None
    assert item.outcome.state is State.FAILED


@pytest.mark.parametrize(("snoozes", "dead"), [(0, False), (9, False), (10, True)])
def test_in_order_the_snoozes_tell_how_long_an_unknown_task_has_waited(
    make: Make, snoozes: int, dead: bool
) -> None:
    bench = make(known=False)
    (item,) = bench.items("a")
    item.session = Slot()
    item.rewrite(ordered=True, snooze_count=snoozes, unknown_since=NOW - 10_000.0)
    assert verdicts(bench).unknown(item) is None
    verdicts(bench).claimed(item, Owned(1))
    expected = DeadLetter if dead else Hold
    assert isinstance(item.settlement, expected)
    if isinstance(item.settlement, Hold):
        assert item.settlement.delay == 30.0


# -- after the run -----------------------------------------------------------------------------


def test_a_run_that_returned_is_completed_with_its_value(make: Make) -> None:
    bench = make()
    item = running(bench)
    verdicts(bench).succeeded(item, b"\x07")
    assert item.settlement == Complete()
    assert item.outcome == Outcome(State.SUCCEEDED, Complete(), b"\x07", at=NOW, duration=2.5)


def test_a_run_without_a_value(make: Make) -> None:
    bench = make()
    item = running(bench)
    verdicts(bench).succeeded(item, None)
    assert item.outcome is not None
    assert item.outcome.value is None


@pytest.mark.parametrize(
    ("decision", "settled", "state"),
    [
        (Resubmit(1.0), False, State.RETRYING),
        (Resubmit(1.0, counted=False), False, State.SNOOZED),
        (DeadLetter("why"), False, State.FAILED),
        (Resubmit(1.0), True, State.FAILED),  # at most once: nothing comes again
        (Abandon(), False, State.RETRYING),
    ],
)
def test_a_run_that_raised_is_what_its_policy_says(
    make: Make, decision: Decision, settled: bool, state: State
) -> None:
    bench = make()
    item = running(bench)
    item.settled = settled
    verdicts(bench).failed(item, decision, "OSError", "disk full", "the trace")
    outcome = item.outcome
    assert outcome is not None
    assert (outcome.state, outcome.value) == (state, None)
    assert (outcome.error_type, outcome.error) == ("OSError", "disk full")
    assert (outcome.traceback, outcome.at, outcome.duration) == ("the trace", NOW, 2.5)
    assert outcome.settlement == item.settlement


def test_a_failure_whose_strategy_makes_it_dead_has_failed(make: Make) -> None:
    bench = make()
    item = running(bench, expires=NOW + 1.0)
    verdicts(bench).failed(item, Resubmit(1.0), "OSError", "disk full", "")
    assert isinstance(item.settlement, DeadLetter)
    assert item.outcome is not None
    assert item.outcome.state is State.FAILED


def test_without_an_error_the_reason_of_the_dead_letter_stands_for_it(make: Make) -> None:
    bench = make()
    item = running(bench)
    verdicts(bench).failed(item, DeadLetter("rejected", "not for us"), "", "", "")
    assert item.outcome is not None
    assert (item.outcome.error_type, item.outcome.error) == ("rejected", "not for us")


@pytest.mark.parametrize(("retries", "again"), [(1, True), (0, False)])
def test_a_run_that_died_is_what_the_tasks_policy_says(
    make: Make, retries: int, again: bool
) -> None:
    bench = make(task={"retry": RetryPolicy(max_retries=retries)})
    item = running(bench)
    verdicts(bench).died(item, "WorkerCrashed", "signal 9")
    assert isinstance(item.settlement, Resubmit) is again
    assert item.outcome is not None
    assert (item.outcome.error_type, item.outcome.error) == ("WorkerCrashed", "signal 9")
    assert item.outcome.traceback == ""


def test_a_run_of_an_unknown_task_that_died_is_what_the_apps_policy_says(make: Make) -> None:
    bench = make(retry=RetryPolicy(max_retries=0))
    item = running(bench)
    item.open(message_of(item), None)
    verdicts(bench).died(item, "WorkerCrashed", "signal 9")
    assert isinstance(item.settlement, DeadLetter)


def test_a_run_that_was_cancelled_is_completed(make: Make) -> None:
    bench = make()
    item = running(bench)
    verdicts(bench).cancelled(item)
    assert item.outcome == Outcome(State.CANCELLED, Complete(), None, "", "", "", NOW, 2.5)
    assert item.settlement == Complete()


@pytest.mark.parametrize("text", ["a\udc80b", "a\0b"])
def test_every_text_of_an_outcome_can_be_stored(make: Make, text: str) -> None:
    bench = make()
    item = running(bench)
    verdicts(bench).failed(item, DeadLetter("plain"), text, text, text)
    outcome = item.outcome
    assert outcome is not None
    for stored in (outcome.error_type, outcome.error, outcome.traceback):
        stored.encode()
        assert "\0" not in stored


def test_a_decision_on_a_delivery_that_has_ended_is_our_mistake(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    item.end()
    with pytest.raises(RuntimeError, match="ended cannot decide"):
        verdicts(bench).cancelled(item)


def test_secrets_in_the_name_of_an_error_are_not_recorded(make: Make) -> None:
    bench = make()
    item = running(bench)
    name = "Bad?sig=abcdefghijk&se=1"
    verdicts(bench).failed(item, DeadLetter("why"), name, "no?sig=abcdefghijk&se=1", "")
    assert item.outcome is not None
    assert item.outcome.error_type == "Bad?sig=****&se=1"
    assert "abcdefghijk" not in item.outcome.error
