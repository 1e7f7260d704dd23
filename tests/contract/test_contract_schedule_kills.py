"""A day of schedules on an injected clock, with five workers that die between any two steps."""

from __future__ import annotations

import random
import threading
import time

import pytest
from schedulesim import Killed, World, call
from stores import Store

from aztask.schedules.runner import Runner
from aztask.schedules.schedules import Schedules
from aztask.stores.records.base import ResultStore
from aztask.stores.records.schedules import schedules_of

pytestmark = pytest.mark.kills

START = 1_793_404_800.0
"""2026-10-31 00:00 UTC: the clocks of Berlin went back a week before, those of New York do soon."""
DAY = 86400.0


def declare(schedules: Schedules) -> None:
    schedules.declare(schedules.plan("half", call(1), every=1800, missed="all", max_missed=1000))
    schedules.declare(
        schedules.plan("hourly", call(2), cron="0 * * * *", missed="all", overlap="queue")
    )


def test_24_hours_of_random_kills_record_every_occurrence_once(store: Store) -> None:
    dice = random.Random(23)
    world = World(store.results, START, dice, deaths=0.1)
    numbers = iter(range(10_000))

    def again(index: int) -> Runner:
        while True:
            try:
                return world.worker(f"worker-{next(numbers)}", declare)
            except Killed:
                continue

    workers = [again(index) for index in range(5)]
    step = (5.0, 40.0) if store.name == "local" else (300.0, 900.0)
    workers = world.run(workers, DAY, step, again)
    world.deaths = 0.0
    world.run(workers, 120.0, (10.0, 30.0))
    assert len(set(world.made)) == len(world.made)
    for name, interval in (("shop.half", 1800.0), ("shop.hourly", 3600.0)):
        times = sorted(float(each[-14:]) / 1000 for each in world.made if name in each)
        every = [times[0] + number * interval for number in range(len(times))]
        assert times == every
        assert times[0] <= START + 2 * interval  # workers that die delay the first definition
        assert times[-1] == START + DAY
    assert set(world.sent) == {headers_id(world, each) for each in world.sent}
    assert len(world.sent) == len(world.made)
    schedules = schedules_of(store.results)
    assert schedules is not None
    assert [each.open for each in schedules.overview()] == [(), ()]
    assert world.kills > 20
    repeated = sum(count - 1 for count in world.sent.values())
    assert 0 < repeated < len(world.sent)  # under the same id, so they run once


def headers_id(world: World, task_id: str) -> str:
    """The id that the headers of a task lead to."""
    headers = world.headers[task_id]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(headers["aztask-scheduled-at"]))
    return f"{headers['aztask-schedule']}@{stamp}"


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "the one that makes them dies"])
def test_fifty_workers_cost_at_most_two_conflicts_an_occurrence(
    results: ResultStore, dies: bool
) -> None:
    """Each worker on a thread of its own, in real time."""
    world = World(results, time.time(), random.Random(1))
    stopped: set[str] = set()
    done = threading.Event()

    def every(schedules: Schedules) -> None:
        for number in range(4):
            schedules.declare(schedules.plan(f"s{number}", call(number), every=2))

    workers = {f"worker-{number}": world.worker(f"worker-{number}", every) for number in range(50)}

    def work(name: str) -> None:
        while not done.is_set() and name not in stopped:
            done.wait(min(0.2, workers[name].turn()))

    threads = [threading.Thread(target=work, args=(name,)) for name in workers]
    for thread in threads:
        thread.start()
    begun = time.time()

    def settled() -> bool:
        conflicts = sum(engine.conflicts for engine in world.engines)
        return len(world.made) >= 12 and conflicts <= 2 * len(world.made)

    # Longer where fifty threads share a busy machine: all of them meet at the start, which costs
    # more, and a cost that stays above the bound never settles.
    while (now := time.time()) < begun + 9.0 or (not settled() and now < begun + 90.0):
        world.now = now
        if dies and now > begun + 4.0 and not stopped:
            stopped.add(max(workers, key=world.by))
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    conflicts = sum(engine.conflicts for engine in world.engines)
    assert len(world.made) >= 12
    assert len(set(world.made)) == len(world.made)
    assert conflicts <= 2 * len(world.made), (conflicts, len(world.made))
