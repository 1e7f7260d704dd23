"""What every result store promises: who owns a run, who may record, and what is cleared."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from stores import Store

from aztask.address.owner import Owner
from aztask.errors import ForeignId
from aztask.message.envelope import Envelope
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Hold, Lapse, Resubmit
from aztask.stores.records import deadindex
from aztask.stores.records.base import (
    NOTE_BYTES,
    UNFINISHED_SECONDS,
    Cancelled,
    Finish,
    Measurable,
    Outcome,
    Outdated,
    Owned,
    OwnedElsewhere,
    Recorded,
    ResultStore,
    RunKey,
    RunningTask,
    RunRecord,
    Start,
    State,
    WorkerRecord,
    owner_of,
)
from aztask.stores.records.deadindex import IndexedDeadLetter, Indexing
from aztask.stores.records.tables.store import TablesResults
from aztask.stores.tables import client

KEY = RunKey("a", 0, 0)
LONG = bytes(range(256)) * 1024  # 256 KiB


def a_start(owner: str, position: int = 1, key: RunKey = KEY) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def ended(at: float = 2000.0) -> Outcome:
    return Outcome(State.SUCCEEDED, Complete(), b"\x01", at=at, duration=0.5)


def test_a_new_run_is_owned(results: ResultStore) -> None:
    assert results.start([a_start("one")]) == [Owned(1)]
    record = results.get("a")
    assert record is not None
    assert (record.state, record.starts, record.worker) == (State.STARTED, 1, "worker")


def test_the_same_message_delivered_again_is_taken_over_and_counted(results: ResultStore) -> None:
    results.start([a_start("one")])
    (answer,) = results.start([a_start("two")])
    assert isinstance(answer, Owned)
    assert answer.starts == 2


@pytest.mark.parametrize("decision", [Abandon(), Lapse(), Hold(3.0, 1003.0)])
def test_a_run_whose_message_comes_again_is_counted_and_starts_again(
    results: ResultStore, decision: Decision
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


def test_a_row_keeps_its_last_twenty_starts(results: ResultStore) -> None:
    for number in range(25):
        results.start([replace(a_start(f"o{number}"), at=float(number), worker=f"w{number}")])
    record = results.get("a")
    assert record is not None
    assert (record.starts, record.worker, record.earlier.dropped) == (25, "w24", 5)
    kept = [(each.at, each.worker, each.end) for each in record.earlier.kept]
    assert kept == [(float(number), f"w{number}", "") for number in range(5, 24)]
    assert results.record([Finish(KEY, "o24", ended())]) == [True]
    record = results.get("a")
    assert record is not None
    assert len(record.earlier.kept) == 19, "the end changes nothing of it"


def test_earlier_starts_say_how_they_ended(results: ResultStore) -> None:
    retrying = Outcome(State.RETRYING, Abandon(), None, "OSError", "disk " * 99, "", 2000.0, 0.5)
    results.start([a_start("one")])
    assert results.history("a")[0].earlier.kept == ()
    results.record([Finish(KEY, "one", retrying)])
    results.start([a_start("two")])
    results.disown([(KEY, "two")])
    results.start([a_start("three")])
    (run,) = results.history("a")
    assert [each.end for each in run.earlier.kept] == ["retrying", "given back"]
    assert run.earlier.kept[0].error.startswith("OSError: disk disk")
    assert len(run.earlier.kept[0].error) == 100


def test_a_run_that_the_broker_buried_has_failed(results: ResultStore) -> None:
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


def test_a_run_that_has_gone_on_since_it_was_read_is_not_ended(results: ResultStore) -> None:
    dead = Outcome(State.FAILED, DeadLetter("lost", "gone"), None, "lost", "gone", "", 3000.0, 0.0)

    def bury(name: str, read: RunRecord | None) -> bool:
        run = RunRecord(RunKey(name), "shop.resize", "default", State.FAILED, outcome=dead)
        (done,) = results.bury([run], [read])
        return done

    assert results.get("a") is None
    results.start([a_start("one")])
    assert not bury("a", None), "it has started"
    first = results.get("a")
    assert first is not None
    results.start([replace(a_start("two"), at=(first.started_at or 0.0) + 60.0)])
    assert not bury("a", first), "another delivery has started it again"
    second = results.get("a")
    assert second is not None
    assert second.state is State.STARTED
    assert bury("a", second)
    assert not bury("a", second), "it has ended"
    assert bury("unknown", None)
    assert not bury("another", first)


def test_another_copy_of_a_message_that_comes_again_is_superfluous(results: ResultStore) -> None:
    results.start([a_start("one", position=1)])
    results.record([Finish(KEY, "one", Outcome(State.RETRYING, Abandon()))])
    assert results.start([a_start("two", position=2)]) == [OwnedElsewhere()]


def test_a_clone_ends_its_run(results: ResultStore) -> None:
    outcome = Outcome(State.RETRYING, Resubmit(2.0, 1002.0))
    results.start([a_start("one")])
    results.record([Finish(KEY, "one", outcome)])
    assert results.start([a_start("two")]) == [Recorded(outcome)]


def test_an_older_delivery_takes_no_run_from_a_newer_one(results: ResultStore) -> None:
    """Its worker was frozen until its lease had just ended: it thaws beside the redelivery."""
    assert results.start([a_start(owner_of("new", 3))]) == [Owned(1)]
    assert results.start([a_start(owner_of("old", 2))]) == [Outdated()]
    assert results.record([Finish(KEY, owner_of("old", 2), ended())]) == [False]
    record = results.get("a")
    assert record is not None
    assert (record.state, record.starts) == (State.STARTED, 1)
    assert results.start([a_start(owner_of("new", 3))]) == [Owned(1)]  # asked again: still ours
    (taken,) = results.start([a_start(owner_of("newest", 4))])
    assert isinstance(taken, Owned)
    assert results.record([Finish(KEY, owner_of("newest", 4), ended())]) == [True]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("worker/12", owner_of("new", 1)),  # a row of an earlier release
        (owner_of("new", 5), "worker/12"),  # a worker of an earlier release
        (owner_of("one", 2), owner_of("two", 2)),  # the first was released, which is not counted
        ("worker#9/12", owner_of("new", 1)),  # a worker's name with our mark
    ],
)
def test_without_an_order_of_deliveries_the_run_is_taken_over(
    results: ResultStore, before: str, after: str
) -> None:
    assert results.start([a_start(before)]) == [Owned(1)]
    (taken,) = results.start([a_start(after)])
    assert isinstance(taken, Owned)
    assert taken.starts == 2


def test_another_copy_of_the_message_does_not_own_the_run(results: ResultStore) -> None:
    results.start([a_start("one", position=1)])
    assert results.start([a_start("two", position=2)]) == [OwnedElsewhere()]
    assert results.record([Finish(KEY, "one", ended())]) == [True]


def test_only_the_owner_records_and_only_once(results: ResultStore) -> None:
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
    results: ResultStore,
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
    results: ResultStore, settlement: Complete | DeadLetter | Resubmit
) -> None:
    results.start([a_start("one")])
    outcome = Outcome(State.FAILED, settlement, None, "ValueError", "no", "trace", 2000.0, 0.5)
    results.record([Finish(KEY, "one", outcome)])
    assert results.start([a_start("two")]) == [Recorded(outcome)]


def test_a_disowned_start_does_not_count_and_anybody_may_take_it(results: ResultStore) -> None:
    results.start([a_start("one")])
    results.disown([(KEY, "one")])
    record = results.get("a")
    assert record is not None
    assert (record.state, record.starts) == (State.PENDING, 0)
    (answer,) = results.start([a_start("two", position=2)])
    assert isinstance(answer, Owned)
    assert answer.starts == 1


def test_a_stranger_cannot_disown(results: ResultStore) -> None:
    results.start([a_start("one")])
    results.disown([(KEY, "two")])
    assert results.record([Finish(KEY, "one", ended())]) == [True]


def test_a_cancelled_task_is_not_to_be_run(results: ResultStore) -> None:
    assert results.cancel("a", 1.0)
    assert results.start([a_start("one")]) == [Cancelled(1)]


def test_what_has_ended_cannot_be_cancelled(results: ResultStore) -> None:
    results.start([a_start("one")])
    results.record([Finish(KEY, "one", ended())])
    assert not results.cancel("a", 1.0)


def test_a_run_is_to_be_stopped_only_where_that_was_asked_for(store: Store) -> None:
    results, another = store.results, store.another
    results.start([a_start("one", key=RunKey(task)) for task in ("a", "b", "c")])
    assert another.to_stop(["a", "b", "c"]) == []
    assert results.cancel("a", 1.0)
    assert another.to_stop(["a", "b", "c"]) == []
    assert results.cancel("b", 1.0, running=True)
    assert results.cancel("b", 2.0), "a later cancellation takes nothing back"
    assert another.to_stop(["a", "b", "c"]) == ["b"]
    assert another.to_stop(["c"]) == []
    assert results.cancel("a", 3.0, running=True)
    assert another.to_stop(["c", "b", "a"]) == ["b", "a"]
    results.forget("a")
    results.purge(2.5)
    assert another.to_stop(["a", "b", "c"]) == []


def test_among_very_many_runs_that_are_to_be_stopped_each_one_is_known(
    results: ResultStore,
) -> None:
    tasks = [f"t{n}" for n in range(640)]
    with ThreadPoolExecutor(16) as pool:
        cancel = partial(results.cancel, at=1.0, running=True)
        assert all(pool.map(cancel, tasks[::2]))
        assert all(pool.map(partial(results.cancel, at=1.0), tasks[1::8]))
    assert results.to_stop(tasks) == tasks[::2]


def test_an_expected_run_is_pending_and_then_owned(results: ResultStore) -> None:
    results.expect([RunRecord(KEY, "shop.resize", "default", State.PENDING)])
    record = results.get("a")
    assert record is not None
    assert record.state is State.PENDING
    (answer,) = results.start([a_start("one")])
    assert isinstance(answer, Owned)
    assert answer.starts == 1


def test_forgetting_a_task(results: ResultStore) -> None:
    results.start([a_start("one")])
    assert results.forget("a")
    assert not results.forget("a")
    assert results.get("a") is None


def test_what_is_old_is_purged_and_the_rest_is_left(results: ResultStore) -> None:
    keys = [RunKey(f"t{n}") for n in range(60)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    results.record([Finish(key, "one", ended(10.0)) for key in keys[:40]])
    results.record([Finish(key, "one", ended(100.0)) for key in keys[40:-1]])
    assert results.purge(50.0) == 40
    assert results.purge(50.0) == 0
    assert results.get("t0") is None
    assert results.get(keys[-1].task_id) is not None, "what has not ended is never cleared"
    assert {run.key for run in results.recent(state=State.SUCCEEDED)} == set(keys[40:-1])
    assert results.purge(1000.0) == 19
    assert results.recent(state=State.SUCCEEDED) == []


def test_a_purge_takes_expected_runs_and_old_marks_of_cancellation_with_it(
    results: ResultStore,
) -> None:
    results.expect([RunRecord(KEY, "shop.resize", "default", State.PENDING)])
    results.start([a_start("one")])
    results.record([Finish(KEY, "one", ended(10.0))])
    results.cancel("b", 20.0)
    assert results.purge(50.0) == 1
    assert results.get("a") is None
    assert results.get("b") is None
    assert results.start([a_start("one", key=RunKey("b"))]) == [Owned(1)]


def test_the_newest_come_first_of_all_or_of_one_state(store: Store) -> None:
    results = store.results
    keys = [RunKey(f"t{n}") for n in range(12)]
    results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    for n, key in enumerate(keys[:-1]):
        state = State.FAILED if n % 3 == 0 else State.SUCCEEDED
        outcome = replace(ended(7200.0 * n), state=state, error=f"{n}")
        results.record([Finish(key, "one", outcome)])
    shown = [run.key for run in results.recent()]
    assert shown[0] == keys[-1] or not store.lists_running
    assert [key for key in shown if key != keys[-1]] == keys[-2::-1]
    assert [run.key for run in results.recent(state=State.FAILED)] == [
        keys[n] for n in (9, 6, 3, 0)
    ]
    (newest,) = results.recent(state=State.FAILED, limit=1)
    assert newest == results.get("t9")


def test_the_latest_run_of_a_task_and_all_of_them(results: ResultStore) -> None:
    keys = [RunKey("a", 0, 0), RunKey("a", 0, 1), RunKey("a", 0, 10), RunKey("a", 2, 3)]
    clone = Outcome(State.RETRYING, Resubmit(1.0, 2.0), None, "OSError", "disk", "", 5.0)
    for n, key in enumerate(keys):
        results.expect([RunRecord(key, "shop.resize", "default", State.PENDING)])
        latest = results.get("a")
        assert latest is not None
        assert (latest.key, latest.state) == (key, State.PENDING)
        results.start([a_start("one", n, key)])
        results.record([Finish(key, "one", clone)])
    assert [run.key for run in results.history("a")] == keys
    assert [run.outcome for run in results.history("a")] == [clone] * 4
    latest = results.get("a")
    assert latest is not None
    assert latest.key == keys[-1]
    assert results.history("nobody") == []


@pytest.mark.parametrize("started", [False, True], ids=["sent first", "started first"])
def test_the_senders_note_stays_with_the_first_run(store: Store, started: bool) -> None:
    """A fast worker may start the task before its sender stores the note."""
    sent = RunRecord(KEY, "shop.resize", "default", State.PENDING)
    results, noted = store.results, replace(sent, note=b"n" * NOTE_BYTES)
    if started:
        results.start([a_start("one")])
        results.expect([noted])
    else:
        results.expect([noted])
        assert [each.note for each in results.history("a")] == [noted.note]
        results.start([a_start("one")])
    results.expect([replace(noted, note=b"another"), sent])
    retry = Outcome(State.RETRYING, Resubmit(5.0, 1234.5), None, "OSError", at=2000.0)
    results.record([Finish(KEY, "one", retry)])
    results.start([a_start("two", 2, RunKey("a", 0, 1))])
    first, second = store.another.history("a")
    assert (first.note, first.state) == (noted.note, State.RETRYING)
    assert (second.note, second.state) == (None, State.STARTED)


def test_expecting_what_is_known_changes_nothing(results: ResultStore) -> None:
    results.start([a_start("one")])
    expected = RunRecord(KEY, "other", "other", State.PENDING)
    results.expect([expected, expected])
    results.expect(iter(()))
    record = results.get("a")
    assert record is not None
    assert (record.state, record.task) == (State.STARTED, "shop.resize")


def test_a_cancellation_is_shown_until_a_worker_meets_it_and_holds_for_later_hops(
    store: Store,
) -> None:
    results = store.results
    results.expect([RunRecord(KEY, "shop.resize", "default", State.PENDING)])
    assert results.cancel("a", 1.0)
    record = store.another.get("a")
    assert record is not None
    assert record.state is State.CANCELLED
    assert store.another.start([a_start("one"), a_start("x", key=RunKey("b"))]) == [
        Cancelled(1),
        Owned(1),
    ]
    assert results.start([a_start("one", key=RunKey("a", 0, 7))]) == [Cancelled(1)]
    assert results.start([a_start("two")]) == [Cancelled(2)], "counted, as if it had run"


def test_among_very_many_cancelled_tasks_each_one_is_known(results: ResultStore) -> None:
    tasks = [f"t{n}" for n in range(640)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda task: results.cancel(task, 1.0), tasks[::2]))
    answers = results.start([a_start("one", n, RunKey(task)) for n, task in enumerate(tasks)])
    assert answers == [Cancelled(1), Owned(1)] * 320


@pytest.mark.parametrize("value", [b"", LONG], ids=["small", "large"])
def test_values_of_any_size_are_kept_whole(store: Store, value: bytes) -> None:
    text = "é" * len(value)
    outcome = Outcome(State.FAILED, Complete(), value, "E", text, text, 2000.0, 0.5)
    store.results.start([a_start("one")])
    assert store.results.record([Finish(KEY, "one", outcome)]) == [True]
    record = store.another.get("a")
    assert record is not None
    assert record.outcome == outcome
    assert store.another.start([a_start("two")]) == [Recorded(outcome)]
    assert [run.outcome for run in store.another.recent(state=State.FAILED)] == [outcome]
    assert store.another.forget("a")
    assert store.results.recent(state=State.FAILED) == []


@pytest.mark.parametrize("size", [1, len(LONG)])
def test_a_checkpoint_is_there_at_the_next_start(store: Store, size: int) -> None:
    results = store.results
    results.start([a_start("one")])
    assert results.save(KEY, "one", LONG[:size])
    assert results.save(KEY, "one", LONG[-size:]), "the last one counts"
    assert not results.save(KEY, "two", b"no")
    assert not results.save(RunKey("unknown"), "one", b"no")
    assert store.another.start([a_start("two")]) == [Owned(2, LONG[-size:])]
    assert not results.save(KEY, "one", b"late"), "it is not its run any more"
    retrying = Outcome(State.RETRYING, Abandon(), at=1.0)
    assert store.another.record([Finish(KEY, "two", retrying)]) == [True]
    assert not store.another.save(KEY, "two", b"late"), "its run has ended"
    assert results.start([a_start("three")]) == [Owned(1, LONG[-size:], failures=1)]
    assert results.record([Finish(KEY, "three", ended())]) == [True]


def test_who_was_frozen_while_another_took_over_records_nothing(store: Store) -> None:
    frozen, other = store.results, store.another
    frozen.start([a_start("frozen")])
    assert other.start([a_start("other")]) == [Owned(2)]
    assert frozen.record([Finish(KEY, "frozen", ended(1.0))]) == [False]
    assert not frozen.save(KEY, "frozen", b"x")
    frozen.disown([(KEY, "frozen")])
    assert other.record([Finish(KEY, "other", ended(2.0))]) == [True]
    assert frozen.record([Finish(KEY, "frozen", ended(3.0))]) == [False]
    record = frozen.get("a")
    assert record is not None
    assert record.outcome == ended(2.0)


def test_of_many_at_once_one_owns_and_one_records(store: Store) -> None:
    """Ten owners of ten copies, in two clients: whoever is first owns it, nobody else runs it."""
    stores = [store.results, store.another] * 5
    for number in range(5):
        key = RunKey(f"race-{number}")
        with ThreadPoolExecutor(10) as pool:
            answers = list(
                pool.map(
                    lambda n, key=key: stores[n].start([a_start(f"owner-{n}", n, key)])[0],
                    range(10),
                )
            )
            assert answers.count(Owned(1)) == 1
            assert answers.count(OwnedElsewhere()) == 9
            recorded = list(
                pool.map(
                    lambda n, key=key: stores[n].record([Finish(key, f"owner-{n}", ended(n))])[0],
                    range(10),
                )
            )
        assert recorded == [answer == Owned(1) for answer in answers]


def test_of_many_deliveries_of_one_message_the_last_one_records(store: Store) -> None:
    """Each takes the run over from the one before; starts are counted, and one outcome stands."""
    stores = [store.results, store.another] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: stores[n].start([a_start(f"owner-{n}")])[0], range(8)))
        assert all(isinstance(answer, Owned) for answer in answers)
        starts = sorted(answer.starts for answer in answers if isinstance(answer, Owned))
        assert starts == list(range(1, 9))
        recorded = list(
            pool.map(lambda n: stores[n].record([Finish(KEY, f"owner-{n}", ended(n))])[0], range(8))
        )
    assert recorded.count(True) == 1
    last = answers.index(Owned(8))
    assert recorded[last]
    record = store.results.get("a")
    assert record is not None
    assert record.outcome == ended(last)


@pytest.mark.parametrize(
    "task_id",
    ["a/b\\c#d?e%f", "\u00e9\x07\n", "x" * 5000, "A", "_", "'quoted'", "a b", "-~!", "\U0001f600"],
)
def test_task_ids_of_any_kind(results: ResultStore, task_id: str) -> None:
    others = [task_id + "x", task_id.lower() + "y", f"{task_id}/"]
    key = RunKey(task_id)
    results.start([a_start("one", n, RunKey(other)) for n, other in enumerate(others)])
    assert results.start([a_start("one", 9, key)]) == [Owned(1)]
    assert results.save(key, "one", LONG)
    assert results.record([Finish(key, "one", replace(ended(), value=LONG))]) == [True]
    (run,) = results.history(task_id)
    assert run.key == key
    assert run.outcome is not None
    assert run.outcome.value == LONG
    assert [run.key for run in results.recent(state=State.SUCCEEDED)] == [key]
    assert results.purge(5000.0) == 1
    assert results.get(task_id) is None
    assert all(results.get(other) is not None for other in others)


def test_no_more_than_nothing(results: ResultStore) -> None:
    assert results.start([]) == []
    assert results.record([]) == []
    assert results.bury([]) == []
    results.disown([])
    assert results.record([Finish(KEY, "one", ended())]) == [False]
    assert results.get("a") is None


def test_workers_newest_sign_of_life_first(store: Store) -> None:
    tasks = (
        RunningTask("id-1", "shop.täsk", "a", 1.5, 2, b"\x07"),
        RunningTask("\ud800", "t", "b", 2.5),
    )
    one = WorkerRecord("host-1", 1.0, 100000.0, ("a", "b"), 3, 2**40, leased=7, tasks=tasks)
    two = WorkerRecord("host-2/é", 2.0, 100007.0, (), 0, 0, stopped=True)
    store.results.heartbeat(one)
    store.results.heartbeat(two)
    assert store.another.workers() == [two, one]
    later = replace(one, seen_at=100009.0, running=0, tasks=())
    store.another.heartbeat(later)
    assert store.results.workers() == [later, two]


def test_of_what_a_worker_runs_a_row_holds_as_much_as_fits(store: Store) -> None:
    tasks = tuple(RunningTask(f"{number}-" + "i" * 2000, "t", "q", 1.0) for number in range(100))
    store.results.heartbeat(WorkerRecord("w", 1.0, 100000.0, ("q",), 100, 0, tasks=tasks))
    (found,) = store.another.workers()
    assert found.running == 100
    assert 10 <= len(found.tasks) < 100
    assert found.tasks == tasks[: len(found.tasks)]


def test_waiting_for_a_change_ends(results: ResultStore) -> None:
    seen = results.wait_changed(0, 0.01)
    assert results.wait_changed(seen, 0.01) >= seen


def letter(number: int, body: bytes = b"x") -> IndexedDeadLetter:
    envelope = Envelope(body, headers={"a": [1, "é"]}, message_id=f"m/{number}")
    return IndexedDeadLetter("orders", envelope, "Reason", f"because {number}", 100.0 + number, 3)


@pytest.mark.parametrize("broker", ["", "servicebus://shop.servicebus.windows.net"])
def test_the_index_of_dead_letters(
    store: Store, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadindex, "PAGE", 3)
    monkeypatch.setattr(deadindex, "SHORT_PAGE", 3)
    first_store, second_store = store.of(Owner(broker)), store.of(Owner(broker))
    assert isinstance(first_store, Indexing)
    assert isinstance(second_store, Indexing)
    index, other = first_store.dead_index, second_store.dead_index
    letters = [letter(n, LONG[: 70_000 * (n % 2)]) for n in range(10)]
    for each in letters:
        index.note([each])
    other.note([replace(letters[3], reason="another")])
    other.note([replace(letters[0], queue="other")])
    assert list(other.notes("orders")) == letters
    index.drop("orders", {letters[1].key, "unknown"})
    other.drop("orders", {letters[1].key})
    kept = {letters[2].key, letters[5].key}
    assert index.keep_only("orders", kept, 108.0) == 5
    left = [each.key for each in other.notes("orders")]
    assert left == [letters[n].key for n in (2, 5, 8, 9)]
    assert len(list(other.notes("other"))) == 1


def test_runs_whose_messages_are_gone_are_purged_in_the_end(results: ResultStore) -> None:
    """Nothing ends them: their queue was emptied, or the service let their messages expire."""
    now = time.time()

    state = results.get
    for name, due in (("sent", None), ("soon", now + 50.0), ("later", now + 5000.0)):
        record = RunRecord(RunKey(name), "shop.resize", "default", State.PENDING, due=due)
        results.expect([record])
    started = Start(RunKey("started"), "shop.resize", "default", 1, "one", "worker", now)
    assert results.start([started]) == [Owned(1)]
    returned = replace(started, key=RunKey("returned"))
    results.start([returned])
    results.disown([(returned.key, returned.owner)])

    def purge(before: float) -> None:
        if isinstance(results, TablesResults):
            results._sweep_at = 0.0  # the sweep that is due once an hour
        results.purge(before)

    purge(now - 1.0)
    assert all(map(state, ("sent", "soon", "later", "started", "returned")))
    purge(now + 100.0)
    assert (state("sent"), state("soon")) == (None, None)
    assert state("later") is not None, "its message is still scheduled"
    assert state("started") is not None, "it may be running"
    purge(now + UNFINISHED_SECONDS + 100.0)
    assert [state(name) for name in ("later", "started", "returned")] == [None] * 3
    assert results.record([Finish(started.key, "one", ended())]) == [False]
    assert results.start([replace(started, owner="two")]) == [Owned(1)], "it is a new run"


def test_the_size_of_a_store(store: Store) -> None:
    """A Tables store counts its pages of rows, and the blobs of long values."""
    keys = [RunKey(f"t{n}") for n in range(7)]
    store.results.start([a_start("one", n, key) for n, key in enumerate(keys)])
    long = replace(ended(), value=LONG)
    store.results.record([Finish(key, "one", long) for key in keys[:3]])
    store.results.expect([RunRecord(keys[-1], "shop.resize", "default", State.PENDING)])
    assert isinstance(store.results, Measurable)
    size = store.results.size()
    assert (size.rows, size.complete) == (7, True)
    if size.file_bytes is None:
        assert (size.unfinished, size.blobs) == (None, 3)
        assert size.blob_bytes is not None
        assert size.blob_bytes > 3 * len(LONG)
    else:
        assert (size.unfinished, size.blobs) == (4, None)
        assert size.file_bytes > 3 * len(LONG)


@pytest.mark.parametrize("page", [1000, 7, 1])
@pytest.mark.parametrize("every", [1, 3, 25])
def test_many_tasks_are_answered_as_each_by_itself(
    store: Store, page: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are, however many of a store's tasks are asked for, and in which order."""
    monkeypatch.setattr(client, "PAGE", page)
    results = store.results
    theirs, ours = (store.of(Owner(f"local:///{name}")) for name in ("theirs", "ours"))
    names = [f"t{number:02d}" for number in range(50)]
    for number, name in enumerate(names):
        here = theirs if number % 10 == 7 else ours
        for hop in range(number % 3):
            again = Outcome(State.RETRYING, Resubmit(0.0), error_type="OSError", at=1500.0)
            retried = RunKey(name, 0, hop)
            here.start([a_start(name, key=retried)])
            here.record([Finish(retried, name, again)])
        key = RunKey(name, 0, number % 3)
        if number % 5 != 1:
            sent = RunRecord(key, "shop.resize", "default", State.PENDING, note=b"n")
            here.expect([sent])
        if number % 5 > 1:
            here.start([a_start(name, key=key)])
        if number % 5 > 2:
            value = LONG if number == 23 else b"\x01"
            here.record([Finish(key, name, replace(ended(), value=value))])
        if number % 4 == 0:
            here.cancel(name, 1600.0)
    asked = [*names[::every], "unknown", names[0], "marked"][::-1]
    ours.cancel("marked", 1600.0)
    for reader in (ours, results):
        alone: list[object] = []
        for name in asked:
            try:
                alone.append(reader.get(name))
            except ForeignId as error:
                alone.append(str(error))
        found = reader.get_many(asked)
        assert [str(each) if isinstance(each, ForeignId) else each for each in found] == alone
    assert results.get_many([]) == []


def test_a_dense_range_costs_few_requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Azure Tables; in a sparse one each task is asked for."""
    results = store.results
    if not isinstance(results, TablesResults):
        pytest.skip("a store on this machine reads no pages")
    names = [f"t{number:03d}" for number in range(120)]
    results.start([a_start(name, key=RunKey(name)) for name in names])
    monkeypatch.setattr(client, "PAGE", 40)
    asked: list[str] = []
    for name in ("page", "query"):
        method = getattr(client.TableRequests, name)

        def counted(
            self: object, *about: object, name: str = name, method: object = method
        ) -> object:
            asked.append(name)
            return method(self, *about)  # type: ignore[operator]

        monkeypatch.setattr(client.TableRequests, name, counted)
    assert all(results.get_many(names))
    assert asked.count("page") <= 4
    assert asked.count("query") <= 8  # the last few, for which no page is worth it
    asked.clear()
    assert all(results.get_many(names[::10]))
    assert asked.count("page") == 1
    assert asked.count("query") >= 8
