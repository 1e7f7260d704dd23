"""A worker's part of a circuit breaker: counting, putting off, probing, on a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pipelinebench import Bench, make_bench
from runtimes import Noting, make_runtime

from aztask import CircuitBreaker
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.limits.breakers import PROBE_SECONDS, Breakers
from aztask.limits.control import Controls, Scope
from aztask.limits.holders import worker_of
from aztask.queues.engine import Database
from aztask.settlement import DeadLetter, Resubmit
from aztask.worker.breaking import Breaking
from aztask.worker.pausing import FIRST_DELAY, Pausing
from aztask.worker.pipeline.work import Stage, WorkItem
from aztask.worker.upkeep.controlwatch import READ_SECONDS, ControlWatch

BREAKER = CircuitBreaker(share=0.5, window=60, minimum=4, pause=30, longest=100)
TASK = "shop.count"


class Worker(Noting):
    """A worker's pauses and breakers, without its loop; its deliveries are those of the bench."""

    def __init__(self, bench: Bench, name: str) -> None:
        super().__init__()
        self.bench = bench
        self.events: list[str] = []
        emit: Callable[[Any], object] = lambda event: self.events.append(event.reason)  # noqa: E731
        self.runtime = make_runtime(
            bench.app, clock=bench.clock, keeper=bench.keeper, name=name, emit=emit
        )
        self.control = ControlWatch(self.runtime, self)
        self.breaking = Breaking(self.runtime, self)
        put_offs = bench.pipeline.put_offs
        self.pausing = Pausing(self.runtime, put_offs, self.control, self.breaking, self)
        self.tick()

    def control_changed(self, former: Any, now: Any) -> None:
        self.pausing.control_changed(former, now)

    def breakers_changed(self, changes: Any) -> None:
        self.pausing.breakers_changed(changes)

    def reconsidered(self, item: WorkItem) -> None:
        self.pausing.reconsidered(item)

    def tick(self, seconds: float = READ_SECONDS) -> None:
        """Let time pass, and let the worker read what is paused."""
        self.bench.clock.now += seconds
        self.control.tick(self.bench.clock.now)
        self.breaking.tick(self.bench.clock.now)
        self.settle()

    def settle(self) -> None:
        """Wait until the threads have answered."""
        lanes = [self.breaking._lane, self.control._lane]
        while any(lane is not None and len(lane) for lane in lanes):
            self.runtime.mailbox.wait(0.1)

    def receive(self, *ids: str) -> list[WorkItem]:
        """New deliveries of tasks with these ids; returns those that may run."""
        items = self.bench.items(*ids)
        self.runtime.deliveries.opened.clear()
        return self.pausing.admit(items) if self.pausing.active else items

    def run(self, item: WorkItem, *, fails: bool) -> None:
        """The task runs and ends."""
        bench = self.bench
        bench.pipeline.claim([item])
        item.sent()
        if fails:
            bench.pipeline.decisions.failed(item, DeadLetter("x"), "ValueError", "no", "")
        else:
            bench.succeed([item])
        bench.pipeline.finish([item])
        self.breaking.ended(item)
        self.settle()

    def fail(self, *ids: str) -> None:
        for task_id in ids:
            (item,) = self.receive(task_id)
            self.run(item, fails=True)

    def probe(self) -> WorkItem:
        """Take the delivery that has come back as the probe."""
        self.settle()
        (item,) = self.runtime.deliveries.opened
        self.runtime.deliveries.opened.clear()
        return item

    def stop(self) -> None:
        self.control.stop()
        self.breaking.stop()
        self.runtime.mailbox.run()
        self.runtime.mailbox.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    databases: set[Database] = set()
    yield make_bench(databases, task={"breaker": BREAKER})
    for database in databases:
        database.close()


@pytest.fixture
def start(bench: Bench) -> Iterator[Callable[[str], Worker]]:
    workers: list[Worker] = []

    def started(name: str) -> Worker:
        workers.append(Worker(bench, name))
        return workers[-1]

    yield started
    for worker in workers:
        worker.stop()


@pytest.fixture
def worker(start: Callable[[str], Worker]) -> Worker:
    return start("w")


def rows(bench: Bench) -> Any:
    return Breakers(bench.app.results.controls).read()  # type: ignore[union-attr]


def test_without_a_breaker_there_is_no_thread_and_nothing_is_called() -> None:
    databases: set[Database] = set()
    worker = Worker(make_bench(databases), "w")
    assert not worker.breaking.on
    assert worker.breaking._lane is None
    assert not worker.pausing.active
    worker.stop()
    for database in databases:
        database.close()


def test_without_a_result_store_the_worker_does_not_start() -> None:
    databases: set[Database] = set()
    bench = make_bench(databases, results=False, task={"breaker": BREAKER})
    with pytest.raises(ConfigurationError, match="circuit breakers need a result store"):
        Worker(bench, "w")
    for database in databases:
        database.close()


def test_it_opens_at_the_share_and_not_before(worker: Worker, bench: Bench) -> None:
    worker.fail("a", "b", "c")
    assert rows(bench) == {}, "three runs are fewer than the minimum"
    for task_id in ("d", "e", "f", "g"):
        (item,) = worker.receive(task_id)
        worker.run(item, fails=False)
    worker.fail("h")
    assert rows(bench).keys() == {TASK}, "4 of 8"
    row = rows(bench)[TASK]
    assert (row.by, row.why) == ("w", "4 of 8 runs failed in 60 s")
    assert row.until == bench.clock.now + 30.0
    text = f"task {TASK} is paused by its circuit breaker: 4 of 8 runs failed in 60 s"
    assert text in worker.events


def test_old_failures_do_not_count(worker: Worker, bench: Bench) -> None:
    worker.fail("a", "b", "c")
    bench.clock.now += 70.0
    worker.fail("d")
    assert rows(bench) == {}


def test_another_worker_obeys_and_puts_off_until_the_probe(
    worker: Worker, start: Callable[[str], Worker], bench: Bench
) -> None:
    worker.fail(*"abcd")
    other = start("other")
    assert other.receive("x") == []
    (item,) = other.to_finish
    settlement = item.settlement
    assert isinstance(settlement, Resubmit)
    assert not settlement.counted
    assert 28.0 <= settlement.delay <= 36.0
    assert item.decided is not None
    assert item.decided.put_off == f"the circuit breaker of task {TASK} is open"


def test_one_probe_runs_and_its_success_closes_the_breaker(
    worker: Worker, start: Callable[[str], Worker], bench: Bench
) -> None:
    worker.fail(*"abcd")
    other = start("other")
    bench.clock.now += 31.0
    assert worker.receive("x", "y") == []
    assert len(worker.to_finish) == 1, "the second one is put off"
    probe = worker.probe()
    assert worker_of(rows(bench)[TASK].probe_by) == "w"
    other.tick()
    assert other.receive("z") == []
    assert len(other.to_finish) == 1, "one worker probes"
    assert worker.pausing.admit([probe]) == [probe], "it is not stopped on its way"
    worker.run(probe, fails=False)
    assert rows(bench) == {}
    assert f"task {TASK} is resumed: its circuit breaker has closed" in worker.events
    assert len(worker.receive("v")) == 1
    other.tick()
    assert len(other.receive("w")) == 1


def test_of_two_workers_under_one_name_one_probes(
    worker: Worker, start: Callable[[str], Worker], bench: Bench
) -> None:
    worker.fail(*"abcd")
    twin = start("w")
    bench.clock.now += 31.0
    assert worker.receive("x") == []
    worker.probe()
    twin.tick()
    assert twin.receive("y") == []
    twin.settle()
    assert twin.passed == []
    assert len(twin.to_finish) == 1


def test_a_failed_probe_doubles_the_pause(worker: Worker, bench: Bench) -> None:
    worker.fail(*"abcd")
    for number, pause in enumerate((60.0, 100.0, 100.0), 1):
        bench.clock.now = rows(bench)[TASK].until
        assert worker.receive(f"probe{number}") == []
        worker.run(worker.probe(), fails=True)
        row = rows(bench)[TASK]
        assert (row.failures, row.until) == (number, bench.clock.now + pause)
        assert not row.probe_by
    assert "paused by its circuit breaker for longer" in worker.events[-1]


def test_a_probe_without_an_outcome_is_given_back(worker: Worker, bench: Bench) -> None:
    worker.fail(*"abcd")
    bench.clock.now += 31.0
    worker.receive("x")
    probe = worker.probe()
    bench.pipeline.release([probe])
    worker.breaking.ended(probe)
    worker.settle()
    row = rows(bench)[TASK]
    assert (row.failures, row.probe_by) == (0, "")
    worker.receive("y")
    worker.settle()
    assert worker_of(rows(bench)[TASK].probe_by) == "w"


def test_the_probe_of_a_worker_that_died_is_taken_over(
    worker: Worker, start: Callable[[str], Worker], bench: Bench
) -> None:
    worker.fail(*"abcd")
    bench.clock.now += 31.0
    worker.receive("x")
    assert worker.probe().stage is Stage.RECEIVED  # and from here on the worker does nothing
    other = start("other")
    bench.clock.now += PROBE_SECONDS - 3 * READ_SECONDS
    other.tick()
    assert other.receive("y") == []
    assert other.to_finish, "its lease still holds"
    bench.clock.now += 2 * READ_SECONDS
    other.receive("z")
    other.settle()
    assert worker_of(rows(bench)[TASK].probe_by) == "other"


def test_a_long_probe_is_renewed(worker: Worker, bench: Bench) -> None:
    worker.fail(*"abcd")
    bench.clock.now += 31.0
    worker.receive("x")
    worker.settle()
    for _ in range(20):
        worker.tick()
    row = rows(bench)[TASK]
    assert worker_of(row.probe_by) == "w"
    assert row.probe_until > bench.clock.now + READ_SECONDS


def test_a_paused_task_is_not_probed(worker: Worker, bench: Bench) -> None:
    worker.fail(*"abcd")
    Controls(bench.app.results.controls).pause(Scope.TASK, [TASK], 1.0)  # type: ignore[union-attr]
    bench.clock.now += 31.0
    worker.tick()
    worker.receive("x")
    worker.settle()
    assert not rows(bench)[TASK].probe_by
    assert [item.decided.put_off for item in worker.to_finish if item.decided] == [
        f"task {TASK} is paused"
    ]


def test_what_an_operator_closed_runs_again(worker: Worker, bench: Bench) -> None:
    worker.fail(*"abcd")
    Breakers(bench.app.results.controls).close([TASK])  # type: ignore[union-attr]
    worker.tick()
    worker.fail("e")
    assert rows(bench) == {}, "the count began anew"


def test_while_the_store_is_unreachable_what_is_known_stands(
    worker: Worker, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.fail(*"abcd")

    def gone(*arguments: Any) -> Any:
        raise BrokerUnavailable("the store is down")

    bench.clock.now += 31.0
    monkeypatch.setattr(worker.breaking._store, "probe", gone)
    monkeypatch.setattr(worker.breaking._store, "read", gone)
    worker.receive("x")
    worker.settle()
    (item,) = worker.to_finish
    assert isinstance(item.settlement, Resubmit)
    assert item.settlement.delay >= FIRST_DELAY * 0.8 or item.settlement.delay >= READ_SECONDS
    assert worker.receive("y") == []
    worker.tick()
    assert "circuit breakers cannot be read or changed" in caplog.text
    assert worker.pausing.active


def test_what_did_not_run_counts_as_nothing(worker: Worker, bench: Bench) -> None:
    for task_id in "abcdef":
        (item,) = worker.receive(task_id)
        bench.pipeline.release([item])
        worker.breaking.ended(item)
    worker.settle()
    assert rows(bench) == {}
    assert worker.breaking._windows == {}
