"""A whole worker in one thread: the real core, pipeline, lease keeper and stores, step by step."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from aztask import App, Context, RetryPolicy, chord
from aztask.limits.control import Controls, Scope
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.records.local.store import LocalResults
from aztask.support import chance
from aztask.support import clock as clocks
from aztask.worker.options import WorkerOptions

from .stepped import Machine, Play, Script, Time, at_once

RETRY = RetryPolicy(max_retries=3, delay=5.0, backoff=1.0, jitter=False)
QUIET_SECONDS = 30.0


class World:
    """One worker on the local engine, whose steps are chosen at random by a seed."""

    def __init__(self, seed: int, script: Script = at_once, **options: Any) -> None:
        self.time = Time()
        self.dice = random.Random(seed)
        self.database = Database(":memory:")
        self.script = script
        clock = self.time.clock()
        # What has no clock of its own, such as a send, is on the world's.
        self.ambient = ExitStack()
        self.ambient.enter_context(clocks.replaced(clock))
        broker = LocalBroker(self.database, clock=clock)
        results = LocalResults(self.database, clock=clock)
        self.app = App("sim", broker=broker, results=results, retry=RETRY, lease=30.0)
        self.machine = Machine(self.time, self.app, script)
        self.options = WorkerOptions(name="w", **{"concurrency": 2, **options})
        self.app.on_event(lambda event: self.machine.note(event.event, event.task_id))
        broker.declare("default")

    def work(self) -> None:
        """Begin the worker, after the tasks are registered."""
        self.supervisor = self.machine.work(self.options)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Take steps for so many seconds of the world's time, or until it is so."""
        end = self.time.now + seconds
        while not until():
            steps = self.machine.steps()
            if steps:
                steps[self.dice.randrange(len(steps))].take()
                continue
            at = self.machine.next_at
            if at > end:
                self.time.now = max(self.time.now, end)
                return
            self.time.now = max(self.time.now, at)

    def state(self, task_id: str) -> str:
        """How a task stands."""
        return self.app.result(task_id).state

    def kinds(self, task_id: str) -> list[str]:
        """What was noted about a task."""
        return [what for _, what, which in self.machine.trace if which == task_id]

    def close(self) -> None:
        self.ambient.close()
        self.supervisor.close()
        self.app.close()
        self.database.close()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def world(seed: int = 1, script: Script = at_once, **options: Any) -> World:
        worlds.append(World(seed, script, **options))
        return worlds[-1]

    threads = set(threading.enumerate())
    with chance.replaced(random.Random(0)):
        yield world
        for each in worlds:
            each.close()
    assert set(threading.enumerate()) <= threads, "nothing ran beside the steps"


def test_a_task_is_sent_claimed_run_recorded_and_settled(make: Make) -> None:
    world = make()

    @world.app.task(name="add")
    def add(a: int, b: int) -> int:
        return a + b

    world.work()
    result = add.delay(2, 3)
    world.run(QUIET_SECONDS, lambda: world.state(result.id) == "succeeded")
    assert result.get(timeout=0) == 5
    world.run(1.0)
    stats = world.app.broker.stats("default")
    assert (stats.active, stats.leased, stats.scheduled) == (0, 0, 0)
    assert world.kinds(result.id) == ["enqueued", "received", "start", "started", "succeeded"]
    assert len(world.supervisor.core.deliveries) == 0
    assert len(world.machine.keepers[0]) == 0


def test_a_long_run_is_renewed_and_a_failure_waits_for_its_retry(make: Make) -> None:
    world = make(script=lambda message: Play(seconds=100.0))
    runs: list[int] = []

    @world.app.task_with_context(name="flaky")
    def flaky(context: Context) -> str:
        runs.append(context.resubmit_count)
        if len(runs) < 3:
            raise ValueError("not yet")
        return "done"

    world.work()
    result = flaky.delay()
    began = world.time.now
    world.run(1000.0, lambda: world.state(result.id) == "succeeded")
    assert runs == [0, 1, 2]
    assert 310.0 <= world.time.now - began < 320.0, "three runs and two pauses, in no real time"
    kinds = world.kinds(result.id)
    assert kinds.count("renewed") >= 9
    assert kinds.count("resubmitted") == 2
    assert kinds[-1] == "succeeded"


def test_a_lost_lease_stops_the_run_and_another_delivery_takes_over(make: Make) -> None:
    plays = [Play(seconds=100.0), Play(seconds=1.0)]
    world = make(script=lambda message: plays.pop(0))
    runs: list[float] = []
    task = world.app.task(name="slow")(lambda: runs.append(world.time.now))
    world.work()
    result = task.delay()
    world.run(5.0)
    ((_, item),) = [(1, each) for each in world.supervisor.core.deliveries]
    # The service delivers the message to another receiver, so this worker's token is stale.
    item.delivery.token = "stale"
    world.run(60.0, lambda: world.state(result.id) == "succeeded")
    assert "lease_lost" in world.kinds(result.id)
    assert len(runs) == 1, "the first run was stopped before its end"
    assert world.kinds(result.id).count("start") == 2


def test_a_process_that_dies_fails_its_run_and_is_replaced(make: Make) -> None:
    plays = [Play(seconds=2.0, dies=-11), Play(seconds=2.0)]
    world = make(script=lambda message: plays.pop(0))
    task = world.app.task(name="crash")(lambda: "alive")
    world.work()
    result = task.delay()
    world.run(60.0, lambda: world.state(result.id) == "succeeded")
    assert world.kinds(result.id).count("resubmitted") == 1
    assert [process.pid for process in world.machine.processes] == [2, 3]


def test_limits_pauses_and_put_offs_work_without_a_thread(make: Make) -> None:
    world = make()
    world.app.limit("api", rate="1/s")
    done: list[tuple[float, str]] = []

    @world.app.task(name="call", limits=["api"])
    def call(key: str) -> None:
        done.append((world.time.now, key))

    world.work()
    controls = Controls(world.app.results.controls)  # type: ignore[union-attr]
    controls.pause(Scope.TASK, ["call"], world.time.clock().wall())
    for key in "abcd":
        call.delay(key)
    world.run(20.0)
    assert done == [], "they are put off"
    assert world.app.broker.stats("default").scheduled == 4
    controls.resume(Scope.TASK, ["call"])
    world.run(60.0, lambda: len(done) == 4)
    times = sorted(at for at, _ in done)
    assert all(later - former >= 0.95 for former, later in pairwise(times))


def test_a_tick_writes_heartbeats_and_a_drain_ends_the_worker(make: Make) -> None:
    world = make(script=lambda message: Play(seconds=20.0))
    task = world.app.task(name="slow")(lambda: "done")
    world.work()
    result = task.delay()
    world.run(12.0)
    (worker,) = world.app.results.workers()  # type: ignore[union-attr]
    assert (worker.name, worker.running) == ("w", 1)
    world.supervisor.stop()
    ended = False

    def turn() -> bool:
        nonlocal ended
        ended = ended or not world.supervisor.turn()
        return ended

    world.run(60.0, turn)
    assert ended
    assert world.state(result.id) == "succeeded", "a drain lets running tasks finish"


def test_schedules_workflows_and_delays_are_on_the_same_clock(make: Make) -> None:
    world = make()
    done: list[str] = []
    times: dict[str, float] = {}

    @world.app.task(name="note")
    def note(what: str) -> str:
        done.append(what)
        times[what] = world.time.now
        return what

    world.app.schedule("hourly", note.s("scheduled"), every=3600)
    world.work()
    began = world.time.now
    note.with_options(delay=100.0).delay("delayed")
    chord([note.s("a"), note.s("b")], note.si("body")).delay()
    world.run(4 * 3600.0)
    assert done.count("scheduled") == 4
    assert [each for each in done if each in ("a", "b", "body")][-1] == "body"
    assert 100.0 <= times["delayed"] - began <= 102.0
    assert world.time.now == began + 4 * 3600.0


def test_sessions_keep_their_order_through_failures(make: Make) -> None:
    world = make(script=lambda message: Play(seconds=3.0))
    world.app.queue("orders", sessions=True)
    world.app.broker.declare("orders", world.app.queue_options("orders"))
    done: list[str] = []
    failed: set[str] = set()

    @world.app.task(name="step", queue="orders")
    def step(name: str) -> None:
        if name in ("a2", "b1") and name not in failed:
            failed.add(name)
            raise ValueError(name)
        done.append(name)

    world.options = WorkerOptions(name="w", queues=("orders",), concurrency=2)
    world.work()
    for name in ("a1", "b1", "a2", "c1", "b2", "a3"):
        step.with_options(session=name[0]).delay(name)
    world.run(600.0, lambda: len(done) == 6)
    assert [each for each in done if each[0] == "a"] == ["a1", "a2", "a3"]
    assert [each for each in done if each[0] == "b"] == ["b1", "b2"]
    assert "c1" in done
    assert failed == {"a2", "b1"}


def test_a_checkpoint_and_an_extension_are_answered_in_the_middle_of_a_run(make: Make) -> None:
    world = make()
    seen: list[Any] = []

    @world.app.task_with_context(name="chunks")
    def chunks(context: Context) -> str:
        seen.append(context.saved)
        context.checkpoint([*(context.saved or []), len(seen)])
        context.lease.extend(300.0)
        if len(seen) < 3:
            raise ValueError("again")
        return "done"

    world.work()
    result = chunks.delay()
    world.run(60.0, lambda: world.state(result.id) == "succeeded")
    assert seen == [None, [1], [1, 2]]


def course(seed: int) -> list[tuple[float, str, str]]:
    """The trace of a world with failures, crashes and retries, run with this seed."""
    dice = random.Random(seed)

    def script(message: Any) -> Play:
        dies = -9 if dice.random() < 0.2 else None
        return Play(seconds=dice.uniform(0.0, 40.0), dies=dies)

    with chance.replaced(random.Random(seed)):
        world = World(seed, script, concurrency=3)

        def work(number: int) -> int:
            if dice.random() < 0.3:
                raise ValueError(number)
            return number

        task = world.app.task(name="work")(work)
        world.work()
        ids = [task.delay(number).id for number in range(20)]
        world.run(2000.0)
        assert {world.state(each) for each in ids} <= {"succeeded", "failed"}
        world.close()
    return world.machine.trace


def test_one_seed_is_one_course() -> None:
    first, again, other = course(7), course(7), course(8)
    assert first == again
    assert first != other
