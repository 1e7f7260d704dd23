"""At-most-once runs whose workers are gone end as lost, and no other run does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from runtimes import make_runtime
from still import Still

from aztask import App
from aztask.errors import NotUnique, TaskFailed
from aztask.settlement import Complete
from aztask.stores.records.base import (
    LOST,
    SILENT_SECONDS,
    Finish,
    Outcome,
    RunKey,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.onceruns import OnceRun, OnceRuns, once_runs_of
from aztask.worker.upkeep.lostruns import LostRuns

LEASE = 60.0


@dataclass
class Bench:
    """An app with an at-most-once task, the clock, and the events that were written."""

    app: App
    clock: Still
    told: list[Any] = field(default_factory=list)

    def looker(self, name: str = "looks") -> tuple[LostRuns, Any]:
        runtime = make_runtime(self.app, clock=self.clock, emit=self.told.append, name=name)
        return LostRuns(runtime), runtime

    @property
    def notes(self) -> OnceRuns:
        found = once_runs_of(self.app.results)
        assert found is not None
        return found

    def start(self, task_id: str, worker: str, incarnation: str = "") -> OnceRun:
        """What a worker does before the run: claim the start row, and note it."""
        at = self.clock.wall()
        key = RunKey(task_id)
        self.app.results.start([Start(key, "pay", "default", 1, f"{worker}#1", worker, at)])
        run = OnceRun(key, "pay", "default", worker, incarnation, at, LEASE)
        self.notes.note([run])
        return run

    def beat(self, worker: str, *, stopped: bool = False) -> None:
        now = self.clock.wall()
        record = WorkerRecord(worker, now, now, ("default",), 1, 0, stopped)
        self.app.results.heartbeat(record)

    def states(self, *ids: str) -> list[str]:
        return [self.app.result(each).state for each in ids]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    clock = Still()
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/r.db")

    @app.task(name="pay", delivery="at-most-once", unique="arguments", on_conflict="raise")
    def pay(order: int) -> None:
        """It runs nowhere in these tests."""

    yield Bench(app, clock)
    app.close()


def test_a_run_whose_worker_is_gone_ends_as_lost(bench: Bench) -> None:
    bench.beat("died")
    bench.start("a", "died")
    looker, runtime = bench.looker()
    for _ in range(3):
        looker.look(bench.app.results)
        assert bench.states("a") == [State.STARTED]
        bench.clock.now += LEASE / 3
    looker.look(bench.app.results)
    runtime.mailbox.run()
    with pytest.raises(TaskFailed, match="worker died ended while it ran") as failure:
        bench.app.result("a").get(timeout=1)
    assert failure.value.error_type == LOST
    assert [(each.event, each.task_id, each.error_type) for each in bench.told] == [
        ("failed", "a", LOST)
    ]
    assert list(bench.notes.all()) == []


def test_a_worker_that_is_heard_of_keeps_its_runs(bench: Bench) -> None:
    bench.start("a", "lives")
    looker, _ = bench.looker()
    for _ in range(20):
        bench.beat("lives")
        looker.look(bench.app.results)
        bench.clock.now += LEASE - 1
    assert bench.states("a") == [State.STARTED]
    assert len(list(bench.notes.all())) == 1


def test_a_wrong_clock_of_a_worker_ends_no_run(bench: Bench) -> None:
    """Its heartbeats are hours old by this machine's clock, but they go on."""
    bench.start("a", "behind")
    looker, _ = bench.looker()
    for turn in range(10):
        record = WorkerRecord("behind", 1.0, 100.0 + turn, ("default",), 1, 0)
        bench.app.results.heartbeat(record)
        looker.look(bench.app.results)
        bench.clock.now += LEASE - 1
    assert bench.states("a") == [State.STARTED]


def test_a_worker_without_a_row_is_gone_as_well(bench: Bench) -> None:
    """The store forgets workers after a day."""
    bench.start("a", "forgotten")
    looker, _ = bench.looker()
    looker.look(bench.app.results)
    bench.clock.now += LEASE
    looker.look(bench.app.results)
    assert bench.states("a") == [State.FAILED]


def test_a_worker_under_the_name_of_the_dead_one_ends_its_runs(bench: Bench) -> None:
    bench.start("a", "pod-0", "first life")
    looker, runtime = bench.looker("pod-0")
    own = bench.start("b", "pod-0", runtime.incarnation)
    for _ in range(3):
        bench.beat("pod-0")
        looker.look(bench.app.results)
        bench.clock.now += LEASE / 2
    assert bench.states("a", "b") == [State.FAILED, State.STARTED]
    assert list(bench.notes.all()) == [own]


def test_short_leases_wait_until_the_worker_is_silent(bench: Bench) -> None:
    run = bench.start("a", "died")
    bench.notes.note([replace(run, lease=1.0)])
    looker, _ = bench.looker()
    looker.look(bench.app.results)
    bench.clock.now += SILENT_SECONDS - 0.1
    looker.look(bench.app.results)
    assert bench.states("a") == [State.STARTED]
    bench.clock.now += 0.2
    looker.look(bench.app.results)
    assert bench.states("a") == [State.FAILED]


def test_runs_that_ended_or_that_another_worker_took_stay_as_they_are(bench: Bench) -> None:
    results = bench.app.results
    for name in ("ended", "taken", "gone"):
        bench.start(name, "died")
    outcome = Outcome(State.SUCCEEDED, Complete(), at=bench.clock.wall())
    assert results.record([Finish(RunKey("ended"), "died#1", outcome)]) == [True]
    at = bench.clock.wall()
    results.start([Start(RunKey("taken"), "pay", "default", 1, "other#2", "other", at)])
    results.forget("gone")
    looker, _ = bench.looker()
    looker.look(results)
    bench.clock.now += LEASE
    looker.look(results)
    assert bench.states("ended", "taken", "gone") == [
        State.SUCCEEDED,
        State.STARTED,
        State.PENDING,
    ]
    assert list(bench.notes.all()) == []


def test_of_two_that_look_one_reports_it(bench: Bench) -> None:
    bench.start("a", "died")
    lookers = [bench.looker(name) for name in ("one", "two")]
    for looker, _ in lookers:
        looker.look(bench.app.results)
    bench.clock.now += LEASE
    kept = list(bench.notes.all())
    for looker, runtime in lookers:
        bench.notes.note(kept)  # the second one read it before the first one deleted it
        looker.look(bench.app.results)
        runtime.mailbox.run()
    assert len(bench.told) == 1


def test_a_lost_run_frees_its_unique_key(bench: Bench) -> None:
    pay = bench.app.tasks["pay"]
    result = pay.delay(1)
    (delivery,) = bench.app.broker.receiver("default", lease=LEASE).receive(1, 0.0)
    run = bench.start(result.id, "died")
    with pytest.raises(NotUnique):
        pay.delay(1)
    looker, _ = bench.looker()
    looker.look(bench.app.results)
    bench.clock.now += LEASE
    looker.look(bench.app.results)
    assert bench.states(result.id) == [State.FAILED]
    assert pay.delay(1).id != result.id
    assert delivery is not None
    assert run.worker == "died"


def test_a_damaged_note_stops_nothing(bench: Bench) -> None:
    bench.start("a", "died")
    rows = bench.notes._rows
    (row,) = rows.of_owner(bench.notes.owner)
    rows.put(row.place._replace(key="x"), {"data": b"\xc1"})
    rows.put(row.place._replace(key="y"), {"data": b"\x91\x02"})
    looker, _ = bench.looker()
    looker.look(bench.app.results)
    bench.clock.now += LEASE
    looker.look(bench.app.results)
    assert bench.states("a") == [State.FAILED]


def test_only_an_app_with_such_tasks_looks_often(bench: Bench, tmp_path: Path) -> None:
    assert bench.looker()[0].usual
    plain = App("plain", broker=f"local://{tmp_path}/p.db")
    assert not LostRuns(make_runtime(plain, clock=bench.clock)).usual
    plain.close()
