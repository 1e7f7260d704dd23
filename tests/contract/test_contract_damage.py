"""What every result store promises of rows that somebody damaged: they harm nothing beside them.

Each test damages every second row of one batch, each in another way, by real writes past the store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from damaging import (
    ABSENT,
    LOCAL_DAMAGES,
    NOTE_DAMAGES,
    RUN_DAMAGES,
    TABLES_DAMAGES,
    WORKER_DAMAGES,
)
from stores import Store

from aztask.message.envelope import Envelope
from aztask.settlement import Complete, DeadLetter, Resubmit
from aztask.stores.records.base import (
    Cancelled,
    Finish,
    Outcome,
    Owned,
    OwnedElsewhere,
    Recorded,
    ResultStore,
    RunKey,
    RunningTask,
    RunRecord,
    Start,
    State,
    Unreadable,
    WorkerRecord,
)
from aztask.stores.records.deadindex import IndexedDeadLetter, Indexing

FAR = 1e11
LONG = bytes(range(256)) * 1024
DEAD = Outcome(State.FAILED, DeadLetter("Max", "10"), None, "Max", "10", "", 3000.0, 0.0)
LATER_CLONE = Outcome(
    State.RETRYING, Resubmit(5.0, 1234.5), b"\x01", "OSError", "disk", "trace", 2000.0, 0.5
)


def a_start(owner: str, position: int | str = 1, key: RunKey = RunKey("a")) -> Start:
    return Start(key, "shop.resize", "default", position, owner, "worker", 1000.0)


def run_damages(store: Store) -> Mapping[str, Mapping[str, object]]:
    return RUN_DAMAGES | (LOCAL_DAMAGES if store.name == "local" else TABLES_DAMAGES)


class Batch:
    """Runs beside each other, every second one damaged in another way."""

    def __init__(self, store: Store, *, ended: bool) -> None:
        """The index of a key is the position of its message."""
        self.damages = list(run_damages(store).items())
        if not ended:
            self.damages.append(("an end of what runs", {"ended_at": 5.0}))
        else:
            self.damages.append(("no end of what ended", {"ended_at": ABSENT}))
            self.damages.append(("the state of what runs", {"state": "started"}))
        self.keys = [RunKey(f"task {number}") for number in range(2 * len(self.damages) + 1)]
        self.healthy, self.damaged = self.keys[::2], self.keys[1::2]
        assert store.results.start(self.starts("one")) == [Owned(1)] * len(self.keys)
        if ended:
            finishes = [Finish(key, "one", LATER_CLONE) for key in self.keys]
            assert all(store.results.record(finishes))
        for key, (_, changes) in zip(self.damaged, self.damages, strict=True):
            store.outsider.damage_run(key, changes)

    def starts(self, owner: str) -> list[Start]:
        return [a_start(owner, number, key) for number, key in enumerate(self.keys)]

    def kind(self, key: RunKey) -> str:
        return self.damages[self.damaged.index(key)][0]


def reasons_of(records: list[RunRecord]) -> dict[RunKey, str]:
    return {record.key: record.damage for record in records if record.damage}


@pytest.mark.parametrize("ended", [False, True], ids=["started", "ended"])
def test_damaged_rows_are_unreadable_and_the_others_of_the_batch_go_on(
    store: Store, ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Batch(store, ended=ended)
    before = {key: store.outsider.raw(key) for key in batch.damaged}
    answers = dict(zip(batch.keys, store.another.start(batch.starts("two")), strict=True))
    for key in batch.healthy:
        assert answers[key] == (Recorded(LATER_CLONE) if ended else Owned(2))
    for key in batch.damaged:
        answer = answers[key]
        assert isinstance(answer, Unreadable), batch.kind(key)
        assert answer.reason.isprintable()
        assert 10 < len(answer.reason) <= 200
        after = store.outsider.raw(key)
        assert {name: after[name] for name in before[key]} == before[key], "kept for a person"
    again = store.results.start(batch.starts("three"))
    assert [again[n] for n in range(1, len(again), 2)] == [answers[key] for key in batch.damaged]
    said = [record.getMessage() for record in caplog.records if "kept" in record.getMessage()]
    assert len(said) == len(batch.damaged), "each of them once"
    quarantine = store.another.recent(state=State.UNREADABLE, limit=1000)
    assert reasons_of(quarantine) == {
        key: answer.reason for key, answer in answers.items() if isinstance(answer, Unreadable)
    }


@pytest.mark.parametrize("ended", [False, True], ids=["started", "ended"])
def test_other_operations_pass_damaged_rows_over(store: Store, ended: bool) -> None:
    """Before anybody has put them into quarantine."""
    batch = Batch(store, ended=ended)
    results = store.another
    runs = [RunRecord(key, "t", "q", State.FAILED, outcome=DEAD) for key in batch.keys]
    results.expect(runs)
    assert not any(results.save(key, "two", b"half") for key in batch.keys)
    results.disown([(key, "two") for key in batch.keys])
    assert results.to_stop([key.task_id for key in batch.keys]) == []
    expected = [not ended and key in batch.healthy for key in batch.keys]
    assert results.bury(runs) == expected
    assert results.bury(runs) == [False] * len(runs)
    for key in batch.healthy:
        record = results.get(key.task_id)
        assert record is not None
        assert record.outcome == (LATER_CLONE if ended else DEAD)
    found = results.recent(state=State.UNREADABLE, limit=1000)
    assert set(reasons_of(found)) == set(batch.damaged), "a burial puts them into quarantine too"


def test_outcomes_are_recorded_beside_damaged_rows(store: Store) -> None:
    """The worker that owns them is alive, and its rows were damaged while it ran their tasks."""
    batch = Batch(store, ended=False)
    done = Outcome(State.SUCCEEDED, Complete(), b"v", at=2000.0, duration=1.0)
    kept = store.results.record([Finish(key, "one", done) for key in batch.keys])
    for key, stands in zip(batch.keys, kept, strict=True):
        record = store.another.get(key.task_id)
        assert record is not None
        if key in batch.healthy:
            assert stands
            assert record.outcome == done
        elif not stands:
            assert record.state is State.UNREADABLE, batch.kind(key)
    retrying = Outcome(State.RETRYING, Complete(), at=1.0)
    assert not any(store.results.record([Finish(key, "two", retrying) for key in batch.keys]))
    states = dict(zip(batch.damaged, kept[1::2], strict=True))
    assert not states[batch.damaged[[name for name, _ in batch.damages].index("a forged state")]]


@pytest.mark.parametrize("ended", [False, True], ids=["started", "ended"])
def test_damaged_runs_are_shown_as_such_and_the_others_whole(store: Store, ended: bool) -> None:
    batch = Batch(store, ended=ended)
    for key in batch.damaged:
        record = store.results.get(key.task_id)
        assert record is not None
        assert (record.key, record.state) == (key, State.UNREADABLE), batch.kind(key)
        assert record.damage
        assert record.state.final
        assert record.outcome is None
        assert store.another.history(key.task_id) == [record]
    if ended or store.lists_running:
        listed = store.results.recent(limit=1000)
        assert set(reasons_of(listed)) == set(batch.damaged)
        assert {run.key for run in listed if not run.damage} == set(batch.healthy)
    assert store.results.recent(state=State.UNREADABLE) == [], "looking changes nothing"


def test_a_damaged_run_is_started_anew_by_a_replay(store: Store) -> None:
    """Whose generation is the next one, and so has a row of its own."""
    results = store.results
    results.start([a_start("one")])
    store.outsider.damage_run(RunKey("a"), {"state": "banana"})
    (answer,) = results.start([a_start("two")])
    assert isinstance(answer, Unreadable)
    again = RunKey("a", 1)
    assert results.start([a_start("three", 2, again)]) == [Owned(1)]
    assert results.record([Finish(again, "three", DEAD)]) == [True]
    record = store.another.get("a")
    assert record is not None
    assert (record.key, record.outcome, record.damage) == (again, DEAD, "")
    first, second = store.another.history("a")
    assert first.damage
    assert second == record


def test_a_damaged_run_may_be_cancelled_and_forgotten(store: Store) -> None:
    results = store.results
    results.start([a_start("one"), a_start("two", 2, RunKey("b"))])
    for name in ("a", "b"):
        store.outsider.damage_run(RunKey(name), {"starts": "many"})
    assert results.cancel("a", 1.0, running=True), "it may be running"
    assert results.to_stop(["a", "b"]) == ["a"]
    results.start([a_start("three"), a_start("four", 2, RunKey("b"))])
    assert results.forget("a")
    assert results.get("a") is None
    (left,) = results.recent(state=State.UNREADABLE)
    assert left.key == RunKey("b")
    assert results.start([a_start("five")]) == [Owned(1)], "its row is gone, and so is its mark"


def test_a_damaged_row_is_purged_a_retention_after_it_was_found(store: Store) -> None:
    """However long ago the run has ended."""
    batch = Batch(store, ended=True)
    store.results.start(batch.starts("two"))
    assert store.results.purge(time.time() - 10.0) == len(batch.healthy)
    found = store.results.recent(state=State.UNREADABLE, limit=1000)
    assert {run.key for run in found} == set(batch.damaged)
    assert store.another.purge(FAR) == len(batch.damaged)
    assert store.results.recent(state=State.UNREADABLE) == []
    assert store.results.recent(limit=1000) == []
    starts = batch.starts("three")
    assert store.results.start(starts) == [Owned(1)] * len(starts), "nothing of them is left"


def test_a_purge_passes_over_damaged_rows_that_nobody_has_found(store: Store) -> None:
    batch = Batch(store, ended=True)
    purged = store.results.purge(5000.0)
    assert len(batch.healthy) <= purged < len(batch.keys)
    assert not any(store.results.get(key.task_id) for key in batch.healthy)
    left = {key for key in batch.damaged if store.results.get(key.task_id)}
    assert len(left) == len(batch.keys) - purged
    store.results.start([a_start("two", n, key) for n, key in enumerate(batch.damaged)])
    found = store.results.recent(state=State.UNREADABLE, limit=1000)
    assert {run.key for run in found} == left


def test_a_row_is_not_damaged_because_another_one_with_its_number_was(store: Store) -> None:
    for key in (RunKey("a"), RunKey("b")):
        store.results.start([a_start("one", key=key)])
        store.outsider.damage_run(key, {"starts": "many"})
        assert isinstance(store.results.start([a_start("two", key=key)])[0], Unreadable)
        assert store.results.forget(key.task_id)
        assert store.results.start([a_start("one", key=RunKey("c"))]) == [Owned(1)]
        record = store.results.get("c")
        assert record is not None
        assert record.state is State.STARTED
        store.results.forget("c")


def test_a_position_that_no_copy_can_have_does_not_drop_the_message(store: Store) -> None:
    """Taken for the position of another copy, it would have this one completed, and lost."""
    store.results.start([a_start("one", 7), a_start("one", 8, RunKey("b"))])
    forged = "seven" if store.name == "local" else b"\xa5seven"
    store.outsider.damage_run(RunKey("a"), {"position": forged})
    answer, other = store.another.start([a_start("two", 7), a_start("two", 9, RunKey("b"))])
    assert isinstance(answer, Unreadable)
    assert other == OwnedElsewhere()
    record = store.results.get("a")
    assert record is not None
    assert (record.state, record.damage) == (State.UNREADABLE, answer.reason)


def test_a_checkpoint_of_a_damaged_run_is_not_kept(store: Store) -> None:
    store.results.start([a_start("one")])
    store.outsider.damage_run(RunKey("a"), {"state": "banana"})
    assert not store.results.save(RunKey("a"), "one", LONG)
    assert not store.another.save(RunKey("a"), "one", b"short")


def test_a_mark_of_cancellation_that_is_damaged_still_holds_and_grows_old(store: Store) -> None:
    results = store.results
    for name in ("a", "b", "c"):
        assert results.cancel(name, 1.0)
    store.outsider.damage_mark("a", {"at": "now"})
    store.outsider.damage_mark("b", {"at": ABSENT if store.name == "tables" else b"\xff"})
    store.outsider.damage_mark("c", {"running": "yes"})
    assert results.purge(0.5) == 0
    now = time.time()
    starts = [replace(a_start("one", 1, RunKey(name)), at=now) for name in ("a", "b", "c", "d")]
    assert store.another.start(starts) == [Cancelled(1), Cancelled(1), Cancelled(1), Owned(1)]
    assert results.to_stop(["a", "b", "c", "d"]) == []
    assert results.cancel("a", 2.0, running=True)
    assert store.another.to_stop(["a", "b", "c", "d"]) == ["a"]
    results.purge(now + 60)  # the marks are old then; the runs, which have not ended, are kept
    assert results.start([replace(each, owner="two") for each in starts]) == [Owned(2)] * 4


def workers_of(results: ResultStore) -> tuple[list[str], dict[str, str]]:
    """Those that can be read in order, and the damaged ones."""
    found = results.workers()
    healthy = [worker.name for worker in found if not worker.damage]
    assert [worker.name for worker in found[: len(healthy)]] == healthy, "damaged ones come last"
    return healthy, {worker.name: worker.damage for worker in found if worker.damage}


def test_damaged_workers_hide_no_other_worker(store: Store) -> None:
    tasks = (RunningTask("t", "task", "q", 1.0),)
    now = 100000.0
    names = [f"w{number:02}" for number in range(2 * len(WORKER_DAMAGES) + 1)]
    for number, name in enumerate(names):
        store.results.heartbeat(
            WorkerRecord(name, 1.0, now - number, ("q",), 1, 2, leased=1, tasks=tasks)
        )
    for name, changes in zip(names[1::2], WORKER_DAMAGES.values(), strict=True):
        store.outsider.damage_worker(name, changes)
    healthy, damaged = workers_of(store.another)
    assert healthy == names[::2]
    assert set(damaged) == set(names[1::2])
    assert all(reason.isprintable() for reason in damaged.values())
    store.another.heartbeat(WorkerRecord(names[1], 1.0, now + 1, ("q",), 0, 3))
    healthy, damaged = workers_of(store.results)
    assert healthy[0] == names[1], "a living worker repairs its row"
    assert len(damaged) == len(WORKER_DAMAGES) - 1


def a_letter(number: int) -> IndexedDeadLetter:
    envelope = Envelope(b"x" * number, headers={"a": 1}, message_id=f"m{number}")
    return IndexedDeadLetter("orders", envelope, "Reason", f"because {number}", 100.0 + number, 3)


def test_damaged_notes_of_dead_letters_hide_no_other_one(store: Store) -> None:
    assert isinstance(store.results, Indexing)
    index = store.results.dead_index
    letters = [a_letter(number) for number in range(2 * len(NOTE_DAMAGES) + 1)]
    for each in letters:
        index.note([each])
    for each, changes in zip(letters[1::2], NOTE_DAMAGES.values(), strict=True):
        store.outsider.damage_note("orders", each.key, changes)
    seen = list(index.notes("orders"))
    assert [each for each in seen if not each.damage] == letters[::2]
    assert [each.key for each in seen if each.damage] == [each.key for each in letters[1::2]]
    index.note(letters)
    index.drop("orders", {letters[1].key, letters[2].key})
    left = {each.key for each in letters[3:]} | {letters[0].key}
    assert {each.key for each in index.notes("orders")} == left
    kept = {letters[0].key, letters[5].key}
    assert index.keep_only("orders", kept, FAR) == len(left) - len(kept)
    assert {each.key for each in index.notes("orders")} == kept
    index.note([letters[3]])
    (again,) = [each for each in index.notes("orders") if each.key == letters[3].key]
    assert not again.damage, "what was dropped can be noted anew"
    assert index.keep_only("orders", (), FAR) == 3
    assert list(index.notes("orders")) == []
