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
from aztask.errors import BrokerUnavailable, NotUnique, TaskFailed
from aztask.settlement import Complete
from aztask.stores.records.base import (
    LOST,
    SILENT_SECONDS,
    Finish,
    Outcome,
    Owned,
    RunKey,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.onceruns import OnceBeat, OnceRun, OnceRuns, once_runs_of
from aztask.worker.upkeep.heartbeat import LostRuns

LEASE = 60.0
EVERY = 5.0
"""Seconds between two heartbeats."""


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

    def beat(self, worker: str, incarnation: str = "") -> None:
        self.notes.beat(OnceBeat((worker, incarnation), self.clock.wall()))

    def tell(self, name: str, seen_at: float) -> None:
        """The heartbeat that every release writes."""
        record = WorkerRecord(name, 1.0, seen_at, ("default",), 1, 0)
        self.app.results.heartbeat(record)

    def watch(self, looker: LostRuns, seconds: float, *living: tuple[str, str]) -> None:
        """Send our heartbeats and those of living workers for a while, and look after each."""
        end = self.clock.now + seconds
        while True:
            for worker in living:
                self.beat(*worker)
            looker.beat(self.app.results, EVERY)
            looker.look(self.app.results)
            if self.clock.now >= end:
                return
            self.clock.now = min(end, self.clock.now + EVERY)

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
    bench.watch(looker, LEASE - 1)
    assert bench.states("a") == [State.STARTED]
    bench.watch(looker, 1)
    runtime.mailbox.run()
    with pytest.raises(TaskFailed, match="worker died ended while it ran") as failure:
        bench.app.result("a").get(timeout=1)
    assert failure.value.error_type == LOST
    assert [(each.event, each.task_id, each.error_type) for each in bench.told] == [
        ("failed", "a", LOST)
    ]
    assert list(bench.notes.all()) == []


def test_a_worker_that_is_heard_of_keeps_its_runs(bench: Bench) -> None:
    bench.beat("lives")
    bench.start("a", "lives")
    looker, _ = bench.looker()
    for _ in range(20):
        bench.beat("lives")
        bench.watch(looker, LEASE - 1)
    assert bench.states("a") == [State.STARTED]
    assert len(list(bench.notes.all())) == 1


def test_a_wrong_clock_of_a_worker_ends_no_run(bench: Bench) -> None:
    """Silence is measured here, and a heartbeat of 1970 that changes is none."""
    bench.start("a", "behind")
    looker, _ = bench.looker()
    for turn in range(10):
        bench.notes.beat(OnceBeat(("behind", ""), 100.0 + turn))
        bench.watch(looker, LEASE - 1)
    assert bench.states("a") == [State.STARTED]


def test_a_worker_without_a_heartbeat_is_gone_as_well(bench: Bench) -> None:
    bench.start("a", "forgotten")
    looker, _ = bench.looker()
    bench.watch(looker, LEASE)
    assert bench.states("a") == [State.FAILED]


def test_a_worker_under_the_name_of_the_dead_one_ends_its_runs(bench: Bench) -> None:
    bench.beat("pod-0", "first life")
    bench.start("a", "pod-0", "first life")
    looker, runtime = bench.looker("pod-0")
    own = bench.start("b", "pod-0", runtime.incarnation)
    bench.watch(looker, LEASE)
    assert bench.states("a", "b") == [State.FAILED, State.STARTED]
    assert list(bench.notes.all()) == [own]


@pytest.mark.parametrize("name", ["pod-0", "looks"])
def test_two_workers_under_one_name_do_not_stand_in_for_each_other(bench: Bench, name: str) -> None:
    """Neither to keep a dead one's runs, nor to end a living one's: for a twin and for others."""
    bench.start("a", "pod-0", "dies")
    bench.start("b", "pod-0", "lives")
    looker, _ = bench.looker(name)
    bench.watch(looker, 5 * LEASE, ("pod-0", "lives"))
    assert bench.states("a", "b") == [State.FAILED, State.STARTED]
    bench.watch(looker, LEASE + EVERY)
    assert bench.states("b") == [State.FAILED]


def test_the_heartbeat_of_an_older_release_counts_for_its_runs(bench: Bench) -> None:
    old = replace(bench.start("a", "old"), beats=False)
    bench.notes.note([old])
    looker, _ = bench.looker()
    for turn in range(40):
        bench.tell("old", 1000.0 + turn)
        bench.watch(looker, EVERY)
    assert bench.states("a") == [State.STARTED]
    bench.watch(looker, LEASE)
    assert bench.states("a") == [State.FAILED]


def test_an_older_release_under_our_name_is_gone(bench: Bench) -> None:
    bench.notes.note([replace(bench.start("a", "pod-0", "old"), beats=False)])
    looker, _ = bench.looker("pod-0")
    for turn in range(13):
        bench.tell("pod-0", 1000.0 + turn)
        bench.watch(looker, EVERY)
    assert bench.states("a") == [State.FAILED]


def test_an_outage_of_the_store_ends_no_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat could be written then: the silence is measured anew."""
    bench.beat("lives")
    bench.start("a", "lives")
    looker, _ = bench.looker()
    bench.watch(looker, LEASE - 1)
    with monkeypatch.context() as away:
        away.setattr(OnceRuns, "beat", unreachable)
        for _ in range(100):  # the reads succeed, as with a store that is read-only for a while
            with pytest.raises(BrokerUnavailable):
                looker.beat(bench.app.results, EVERY)
            looker.look(bench.app.results)
            bench.clock.now += EVERY
    bench.watch(looker, LEASE - 1)
    assert bench.states("a") == [State.STARTED]
    bench.watch(looker, 1)
    assert bench.states("a") == [State.FAILED]


def test_a_worker_that_goes_on_after_an_outage_keeps_its_runs(bench: Bench) -> None:
    bench.start("a", "lives")
    looker, _ = bench.looker()
    bench.watch(looker, LEASE, ("lives", ""))
    bench.clock.now += 10 * LEASE
    bench.watch(looker, LEASE / 2)
    bench.watch(looker, 2 * LEASE, ("lives", ""))
    assert bench.states("a") == [State.STARTED]


def test_a_worker_that_sends_no_heartbeat_itself_ends_no_run(bench: Bench) -> None:
    """It was frozen, or it cannot write: it does not know whether others can."""
    bench.start("a", "died")
    looker, _ = bench.looker()
    for _ in range(10):
        looker.look(bench.app.results)
        bench.clock.now += LEASE
    for _ in range(10):
        looker.beat(bench.app.results, EVERY)
        looker.look(bench.app.results)
        bench.clock.now += 2 * EVERY
    assert bench.states("a") == [State.STARTED]


def test_a_run_that_goes_on_is_not_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the same name got the message again, after the look has read the run."""
    results = bench.app.results
    bench.start("a", "died")
    looker, _ = bench.looker()
    bench.watch(looker, LEASE - 1)
    history = results.history

    def slow(task_id: str) -> Any:
        found = history(task_id)
        begin_again(bench, run)
        bench.notes.note([replace(run, at=bench.clock.wall(), incarnation="next")])
        return found

    (run,) = bench.notes.all()
    monkeypatch.setattr(results, "history", slow)
    bench.watch(looker, EVERY)
    assert bench.states("a") == [State.STARTED]
    assert [each.incarnation for each in bench.notes.all()] == ["next"]


def test_a_later_start_under_the_name_is_not_ended_before_it_is_noted(bench: Bench) -> None:
    run = bench.start("a", "died")
    looker, _ = bench.looker()
    bench.watch(looker, LEASE - 1)
    begin_again(bench, run)
    bench.watch(looker, EVERY)
    assert bench.states("a") == [State.STARTED]


def begin_again(bench: Bench, run: OnceRun) -> None:
    at = bench.clock.wall()
    start = Start(run.key, "pay", "default", 1, f"{run.worker}#2", run.worker, at)
    (answer,) = bench.app.results.start([start])
    assert isinstance(answer, Owned)


def test_what_dead_workers_leave_is_deleted(bench: Bench) -> None:
    looker, runtime = bench.looker()
    bench.beat("died")
    bench.watch(looker, 10 * EVERY, ("lives", ""))
    own = (runtime.name, runtime.incarnation)
    assert set(bench.notes.read().beats) == {("lives", ""), own}
    looker.beat(bench.app.results, EVERY, stopped=True)
    assert set(bench.notes.read().beats) == {("lives", "")}


def unreachable(*_: Any) -> Any:
    raise BrokerUnavailable("the store is away")


def test_short_leases_wait_until_the_worker_is_silent(bench: Bench) -> None:
    run = bench.start("a", "died")
    bench.notes.note([replace(run, lease=1.0)])
    looker, _ = bench.looker()
    bench.watch(looker, SILENT_SECONDS - 0.1)
    assert bench.states("a") == [State.STARTED]
    bench.watch(looker, 0.2)
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
    bench.watch(looker, LEASE)
    assert bench.states("ended", "taken", "gone") == [
        State.SUCCEEDED,
        State.STARTED,
        State.PENDING,
    ]
    assert list(bench.notes.all()) == []


def test_of_two_that_look_one_reports_it(bench: Bench) -> None:
    bench.start("a", "died")
    lookers = [bench.looker(name) for name in ("one", "two")]
    while bench.clock.now < 1_000_000.0 + LEASE:  # a look short of the end
        for looker, _ in lookers:
            looker.beat(bench.app.results, EVERY)
            looker.look(bench.app.results)
        bench.clock.now += EVERY
    kept = list(bench.notes.all())
    for looker, runtime in lookers:
        bench.notes.note(kept)  # the second one read it before the first one deleted it
        looker.beat(bench.app.results, EVERY)
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
    bench.watch(looker, LEASE)
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
    bench.watch(looker, LEASE)
    assert bench.states("a") == [State.FAILED]


def test_only_an_app_with_such_tasks_looks_often(bench: Bench, tmp_path: Path) -> None:
    assert bench.looker()[0].usual
    plain = App("plain", broker=f"local://{tmp_path}/p.db")
    assert not LostRuns(make_runtime(plain, clock=bench.clock)).usual
    plain.close()
