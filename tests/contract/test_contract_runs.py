"""Every result store: what is done to one run leaves all others as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from stores import Store

from aztask.message.message import CONTINUE, RENEWED
from aztask.settlement import Abandon, Complete, DeadLetter, Resubmit
from aztask.stores.records.base import (
    Finish,
    OtherTask,
    Outcome,
    Owned,
    OwnedElsewhere,
    Recorded,
    ResultStore,
    RunKey,
    RunRecord,
    Start,
    State,
    WorkerRecord,
)

KEYS = [RunKey("a", 0, 0), RunKey("a", 0, 1), RunKey("a", 1, 0), RunKey("a", 1, 1), RunKey("b")]
FAILED = Outcome(
    State.FAILED, DeadLetter("why", "how"), b"v", "OSError", "disk", "trace", 2000.0, 0.5
)
RETRYING = Outcome(State.RETRYING, Abandon(), None, "OSError", "disk", "trace", 2000.0, 0.5)


def a_start(key: RunKey, owner: str, position: int = 1) -> Start:
    return Start(key, "shop.resize", "default", position, owner, f"worker of {owner}", 1000.0)


def owner_of(key: RunKey) -> str:
    return f"owner of {key.task_id}:{key.generation}:{key.hop}"


def state_of(results: ResultStore) -> dict[RunKey, RunRecord]:
    return {run.key: run for task in ("a", "b") for run in results.history(task)}


ACTIONS: dict[str, Callable[[ResultStore, RunKey, str], object]] = {
    "start": lambda results, key, owner: results.start([a_start(key, "new")]),
    "record": lambda results, key, owner: results.record([Finish(key, owner, FAILED)]),
    "count": lambda results, key, owner: results.record([Finish(key, owner, RETRYING)]),
    "bury": lambda results, key, owner: results.bury(
        [RunRecord(key, "shop.resize", "default", State.FAILED, outcome=FAILED)]
    ),
    "save": lambda results, key, owner: results.save(key, owner, b"page 7"),
    "disown": lambda results, key, owner: results.disown([(key, owner)]),
}


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_to_one_run_is_done_to_no_other(
    results: ResultStore,
    action: str,
    key: RunKey,
) -> None:
    """Runs of one task differ by generation and hop; every one has an owner of its own."""
    results.start([a_start(each, owner_of(each)) for each in KEYS])
    before = state_of(results)
    assert set(before) == set(KEYS)
    ACTIONS[action](results, key, owner_of(key))
    after = state_of(results)
    others = [each for each in KEYS if each != key]
    assert {each: after[each] for each in others} == {each: before[each] for each in others}
    answers = results.start([a_start(each, owner_of(each)) for each in others])
    assert answers == [Owned(1)] * len(others), "they are owned as before, and nothing is saved"


@pytest.mark.parametrize("action", ["record", "count", "save", "disown"])
@pytest.mark.parametrize("key", [KEYS[0], KEYS[3]], ids=str)
def test_runs_whose_owners_have_one_name_are_told_apart(
    results: ResultStore, action: str, key: RunKey
) -> None:
    """A worker with a given name counts its deliveries anew when it is started again."""
    results.start([a_start(each, "w/1") for each in KEYS])
    before = state_of(results)
    ACTIONS[action](results, key, "w/1")
    after = state_of(results)
    others = [each for each in KEYS if each != key]
    assert {each: after[each] for each in others} == {each: before[each] for each in others}
    assert results.start([a_start(each, "w/1") for each in others]) == [Owned(1)] * len(others)
    changed = results.start([a_start(key, "w/2")])
    expected: dict[str, object] = {
        "record": Recorded(FAILED),
        "count": Owned(1, failures=1),
        "save": Owned(2, b"page 7"),
        "disown": Owned(1),
    }
    assert changed == [expected[action]], "and it was done to the one that was meant"


@pytest.mark.parametrize("action", ["record", "count", "save", "disown"])
def test_only_the_owner_of_a_run_that_is_under_way_changes_it(
    results: ResultStore,
    action: str,
) -> None:
    key = KEYS[0]
    results.start([a_start(key, "another")])
    before = state_of(results)
    ACTIONS[action](results, key, owner_of(key))
    assert state_of(results) == before
    assert results.start([a_start(key, "another")]) == [Owned(1)]
    results.start([a_start(KEYS[1], owner_of(KEYS[1]))])
    results.record([Finish(KEYS[1], owner_of(KEYS[1]), FAILED)])
    ended = state_of(results)
    ACTIONS[action](results, KEYS[1], owner_of(KEYS[1]))
    assert state_of(results) == ended, "what has ended stays as it is"


def test_a_run_that_starts_again_shows_nothing_of_its_last_end(
    results: ResultStore,
) -> None:
    key = KEYS[0]
    results.start([a_start(key, "one")])
    results.record([Finish(key, "one", RETRYING)])
    assert results.start([a_start(key, "two")]) == [Owned(1, failures=1)]
    record = results.get("a")
    assert record is not None
    assert (record.state, record.outcome, record.worker) == (State.STARTED, None, "worker of two")
    results.record([Finish(key, "two", replace(FAILED, error_type="", error="", traceback=""))])
    record = results.get("a")
    assert record is not None
    assert record.outcome == replace(FAILED, error_type="", error="", traceback="")


@pytest.mark.parametrize(
    "outcome",
    [
        FAILED,
        Outcome(State.SUCCEEDED, Complete(), b"\x01", at=2000.0, duration=0.25),
        Outcome(State.RETRYING, Resubmit(2.0, 2002.0), None, "E", "e", "t", 2000.0, 0.0),
        Outcome(State.SUCCEEDED, Complete(), None, at=2000.0),
    ],
)
def test_an_outcome_comes_back_equal(results: ResultStore, outcome: Outcome) -> None:
    results.start([a_start(KEYS[0], "one")])
    assert results.record([Finish(KEYS[0], "one", outcome)]) == [True]
    (record,) = results.history("a")
    assert record.outcome == outcome
    assert results.start([a_start(KEYS[0], "two")]) == [Recorded(outcome)]


def test_a_copy_of_the_message_elsewhere_is_told_so_and_changes_nothing(
    results: ResultStore,
) -> None:
    results.start([a_start(KEYS[0], "one", position=1)])
    before = state_of(results)
    assert results.start([a_start(KEYS[0], "two", position=2)]) == [OwnedElsewhere()]
    assert state_of(results) == before


@pytest.mark.parametrize("state", ["started", "ended"])
def test_a_start_of_another_task_with_the_same_id_is_told_so_and_changes_nothing(
    results: ResultStore, state: str
) -> None:
    """A program that knows an id cannot end the task of that id with a message of another task."""
    key = KEYS[0]
    results.start([a_start(key, "one")])
    if state == "ended":
        results.record([Finish(key, "one", FAILED)])
    before = state_of(results)
    for position in (1, 2):
        forged = replace(a_start(key, "two", position), task="shop.nothing")
        assert results.start([forged]) == [OtherTask("shop.resize", "default")]
    assert state_of(results) == before


@pytest.mark.parametrize("suffix", [CONTINUE, RENEWED])
def test_a_row_that_an_older_release_has_made_for_a_continuation(
    results: ResultStore, suffix: str
) -> None:
    """It takes the name on the wire for that of a task, and puts the message off."""
    key = KEYS[0]
    older = replace(a_start(key, "one"), task=f"shop.resize{suffix}")
    assert isinstance(results.start([older])[0], Owned)
    assert isinstance(results.start([a_start(key, "two")])[0], Owned)
    forged = replace(a_start(key, "three"), task="shop.nothing")
    assert isinstance(results.start([forged])[0], OtherTask)


def test_of_two_tasks_with_one_id_one_is_told_so(results: ResultStore) -> None:
    """A remote store does not read what was noted at the send, so the first to start has the id."""
    key = KEYS[0]
    results.expect([RunRecord(key, "shop.resize", "default", State.PENDING)])
    forged = replace(a_start(key, "two", 2), task="shop.nothing")
    answers = results.start([forged]) + results.start([a_start(key, "one")])
    if results.remote:
        assert isinstance(answers[0], Owned)
        assert answers[1] == OtherTask("shop.nothing", "default")
    else:
        assert answers[0] == OtherTask("shop.resize", "default")
        assert isinstance(answers[1], Owned)


def test_a_run_in_another_queue_neither_ends_nor_replaces_one(results: ResultStore) -> None:
    key = KEYS[0]
    elsewhere = replace(a_start(key, "two", position=2), queue="low")
    results.start([elsewhere])
    mine = a_start(key, "one")
    assert results.start([mine]) == [OtherTask("shop.resize", "low")], "it is not completed"
    results.record([Finish(key, "two", FAILED)])
    assert results.start([mine]) == [OtherTask("shop.resize", "low")]
    assert results.start([elsewhere]) == [Recorded(FAILED)]


def test_a_message_may_be_forwarded_to_another_queue(results: ResultStore) -> None:
    key = KEYS[0]
    results.expect([RunRecord(key, "shop.resize", "default", State.PENDING)])
    forwarded = replace(a_start(key, "one"), queue="low")
    assert isinstance(results.start([forwarded])[0], Owned)
    assert isinstance(results.start([replace(forwarded, owner="later")])[0], Owned)


def test_forgetting_a_task_forgets_all_of_its_runs_and_no_others(
    results: ResultStore,
) -> None:
    results.start([a_start(each, owner_of(each)) for each in KEYS])
    assert results.forget("a") is True
    assert results.history("a") == []
    assert len(results.history("b")) == 1
    assert results.forget("a") is False


def test_a_purge_takes_what_ended_before_and_not_at_that_time(
    results: ResultStore,
) -> None:
    ends = {"a": 1999.0, "b": 2000.0, "c": 2001.0, "d": None}
    for name, at in ends.items():
        key = RunKey(name)
        results.start([a_start(key, name)])
        if at is not None:
            results.record([Finish(key, name, replace(FAILED, at=at))])
    assert results.purge(2000.0) == 1
    assert [name for name in ends if results.get(name)] == ["b", "c", "d"]


def test_a_cancelled_task_that_no_worker_has_met_is_shown_as_such(
    results: ResultStore,
) -> None:
    assert results.cancel("a", 1000.0) is True
    record = results.get("a")
    assert record is not None
    assert (record.key, record.state) == (RunKey("a"), State.CANCELLED)
    assert (record.task, record.queue) == ("", "")
    results.expect([RunRecord(RunKey("b"), "shop.resize", "default", State.PENDING)])
    results.cancel("b", 1000.0)
    record = results.get("b")
    assert record is not None
    assert (record.task, record.queue, record.state) == (
        "shop.resize",
        "default",
        State.CANCELLED,
    )


def test_a_worker_that_was_silent_for_a_day_is_forgotten(store: Store) -> None:
    if store.name != "local":
        pytest.skip("Azure Tables: the purge forgets them")
    results = store.results
    day = 86400.0
    for name, seen_at in (("old", 0.0), ("day", 1.0), ("new", 1.0 + day)):
        results.heartbeat(WorkerRecord(name, 0.0, seen_at, ("q",), 1, 2))
    assert [worker.name for worker in results.workers()] == ["new", "day"]
    assert results.remote is False


def test_the_newest_hundred_runs_are_listed(store: Store) -> None:
    if store.name != "local":
        pytest.skip("a request for each: see the limit in test_contract_results")
    store.results.start([a_start(RunKey(f"t{n}"), "x") for n in range(101)])
    assert len(store.results.recent()) == 100
    assert [run.key.task_id for run in store.results.recent(limit=2)] == ["t100", "t99"]
