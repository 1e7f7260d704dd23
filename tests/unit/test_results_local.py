"""The local result store: who owns a run, who may record, and what is cleared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aztask.engine import Database
from aztask.results.base import (
    Cancelled,
    Elsewhere,
    Finish,
    Outcome,
    Owned,
    Recorded,
    RunKey,
    RunRecord,
    Start,
    State,
)
from aztask.results.local import PURGE_WINDOW, LocalResults
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Hold, Lapse, Resubmit

KEY = RunKey("a", 0, 0)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[LocalResults]:
    database = Database(str(tmp_path / "results.db"))
    yield LocalResults(database)
    database.close()


def a_start(owner: str, position: int = 1, key: RunKey = KEY) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def ended(at: float = 2000.0) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), b"\x01", at=at, duration=0.5)


def test_a_new_run_is_owned(results: LocalResults) -> None:
    assert results.start([a_start("one")]) == [Owned(1)]
    record = results.get("a")
    assert record is not None
    assert (record.state, record.starts, record.worker) == (State.STARTED, 1, "worker")


def test_the_same_message_delivered_again_is_taken_over_and_counted(results: LocalResults) -> None:
    results.start([a_start("one")])
    (answer,) = results.start([a_start("two")])
    assert isinstance(answer, Owned)
    assert answer.starts == 2


@pytest.mark.parametrize("decision", [Abandon(), Lapse(), Hold(3.0, 1003.0)])
def test_a_run_whose_message_comes_again_is_counted_and_starts_again(
    results: LocalResults, decision: Decision
) -> None:
    """It shows its state and error meanwhile; a clone (the next hop) would end the run."""
    retrying = Outcome(State.RETRYING, decision, None, "OSError", "disk", "", 2000.0, 0.5)
    snoozed = Outcome(State.SNOOZED, decision, at=2001.0)
    assert retrying.again
    results.start([a_start("one")])
    results.start([a_start("two")])
    assert results.record([Finish(KEY, "two", retrying)]) == [True]
    assert results.record([Finish(KEY, "two", retrying)]) == [True], "recorded once, said twice"
    record = results.get("a")
    assert record is not None
    assert (record.state, record.outcome) == (State.RETRYING, retrying)
    assert results.start([a_start("three")]) == [Owned(1, failures=1)]
    record = results.get("a")
    assert record is not None
    assert (record.state, record.outcome) == (State.STARTED, None)
    results.record([Finish(KEY, "three", snoozed), Finish(RunKey("b"), "x", ended())])
    assert results.start([a_start("four")]) == [Owned(1, failures=1, snoozes=1)]
    assert results.start([a_start("five")]) == [Owned(2, failures=1, snoozes=1)]
    assert results.record([Finish(KEY, "four", retrying)]) == [False]


def test_a_run_that_the_broker_buried_has_failed(results: LocalResults) -> None:
    """Started, retrying or unknown; one that has ended stays as it is, and is no news."""
    dead = Outcome(State.FAILED, DeadLetter("Max", "10"), None, "Max", "10", "", 3000.0, 0.0)
    retrying = Outcome(State.RETRYING, Abandon(), at=2000.0)
    results.start(
        [a_start("one"), a_start("x", key=RunKey("again")), a_start("y", key=RunKey("ok"))]
    )
    results.record([Finish(RunKey("again"), "x", retrying), Finish(RunKey("ok"), "y", ended())])
    runs = [
        RunRecord(RunKey(each), "shop.resize", "default", State.FAILED, outcome=dead)
        for each in ("a", "again", "ok", "unknown")
    ]
    assert results.bury(runs) == [True, True, False, True]
    assert results.bury(runs) == [False] * 4
    for name in ("a", "again", "unknown"):
        record = results.get(name)
        assert record is not None
        assert (record.state, record.outcome) == (State.FAILED, dead)
    record = results.get("ok")
    assert record is not None
    assert record.state is State.SUCCEEDED
    assert results.record([Finish(KEY, "one", ended())]) == [False], "its owner is too late"


def test_another_copy_of_a_message_that_comes_again_is_superfluous(results: LocalResults) -> None:
    results.start([a_start("one", position=1)])
    results.record([Finish(KEY, "one", Outcome(State.RETRYING, Abandon()))])
    assert results.start([a_start("two", position=2)]) == [Elsewhere()]


def test_a_clone_ends_its_run(results: LocalResults) -> None:
    outcome = Outcome(State.RETRYING, Resubmit(2.0, 1002.0))
    results.start([a_start("one")])
    results.record([Finish(KEY, "one", outcome)])
    assert results.start([a_start("two")]) == [Recorded(outcome)]


def test_another_copy_of_the_message_does_not_own_the_run(results: LocalResults) -> None:
    results.start([a_start("one", position=1)])
    assert results.start([a_start("two", position=2)]) == [Elsewhere()]
    assert results.record([Finish(KEY, "one", ended())]) == [True]


def test_only_the_owner_records_and_only_once(results: LocalResults) -> None:
    results.start([a_start("one")])
    results.start([a_start("two")])
    assert results.record([Finish(KEY, "one", ended())]) == [False]
    assert results.record([Finish(KEY, "two", ended())]) == [True]
    assert results.record([Finish(KEY, "two", ended(9999.0))]) == [True], "asked twice: it stands"
    record = results.get("a")
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.at == 2000.0


def test_one_fenced_among_many_does_not_keep_the_others_from_recording(
    results: LocalResults,
) -> None:
    keys = [RunKey(f"t{n}") for n in range(5)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    results.start([a_start("two", 2, keys[2])])
    recorded = results.record([Finish(key, "one", ended()) for key in keys])
    assert recorded == [True, True, False, True, True]


@pytest.mark.parametrize(
    "settlement",
    [Complete(), DeadLetter("reason", "description"), Resubmit(5.0, 1234.5, counted=False)],
)
def test_a_recorded_run_answers_with_its_settlement(
    results: LocalResults, settlement: Complete | DeadLetter | Resubmit
) -> None:
    results.start([a_start("one")])
    outcome = Outcome(State.FAILED, settlement, None, "ValueError", "no", "trace", 2000.0, 0.5)
    results.record([Finish(KEY, "one", outcome)])
    assert results.start([a_start("two")]) == [Recorded(outcome)]


def test_a_disowned_start_does_not_count_and_anybody_may_take_it(results: LocalResults) -> None:
    results.start([a_start("one")])
    results.disown([(KEY, "one")])
    (answer,) = results.start([a_start("two", position=2)])
    assert isinstance(answer, Owned)
    assert answer.starts == 1


def test_a_stranger_cannot_disown(results: LocalResults) -> None:
    results.start([a_start("one")])
    results.disown([(KEY, "two")])
    assert results.record([Finish(KEY, "one", ended())]) == [True]


def test_a_cancelled_task_is_not_to_be_run(results: LocalResults) -> None:
    assert results.cancel("a", 1.0)
    assert results.start([a_start("one")]) == [Cancelled(1)]


def test_what_has_ended_cannot_be_cancelled(results: LocalResults) -> None:
    results.start([a_start("one")])
    results.record([Finish(KEY, "one", ended())])
    assert not results.cancel("a", 1.0)


def test_an_expected_run_is_pending_and_then_owned(results: LocalResults) -> None:
    results.expect([RunRecord(KEY, "shop.resize", "default", State.PENDING)])
    record = results.get("a")
    assert record is not None
    assert record.state is State.PENDING
    (answer,) = results.start([a_start("one")])
    assert isinstance(answer, Owned)
    assert answer.starts == 1


def test_purging_clears_what_is_old_over_many_windows_and_leaves_the_rest(
    results: LocalResults,
) -> None:
    count = 2 * PURGE_WINDOW + 100
    keys = [RunKey(f"t{n}") for n in range(count)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    old = keys[: PURGE_WINDOW + 50]
    results.record([Finish(key, "one", ended(10.0)) for key in old])
    results.record([Finish(key, "one", ended(100.0)) for key in keys[len(old) : -1]])
    assert results.purge(50.0) == len(old)
    assert results.purge(50.0) == 0
    assert results.get(keys[-1].task_id) is not None, "what has not ended is never cleared"
    assert len(results.recent(limit=count)) == count - len(old)


def test_forgetting_a_task(results: LocalResults) -> None:
    results.start([a_start("one")])
    assert results.forget("a")
    assert not results.forget("a")
    assert results.get("a") is None
