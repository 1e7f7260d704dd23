"""Two owners on one store: schedules and their occurrences."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from aztask.operate.findings import schedule_findings
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.runner import Runner
from aztask.schedules.schedules import Schedules
from aztask.schedules.stored import Made, Schedule
from aztask.schedules.view import View
from aztask.stores.records.schedules import Occurrence, ScheduleStore, move_schedule, schedules_of

if TYPE_CHECKING:
    from owners import World

HOUR = 3600.0
NAME = "shop.tick"


def engine_of(world: World) -> ScheduleEngine:
    return world.app.schedules.engine


def store_of(world: World) -> ScheduleStore:
    found = schedules_of(world.store)
    assert found is not None
    return found


def has_task(world: World) -> Schedules:
    """The app has the task of the schedules, but declares none. Returns its schedules."""

    @world.app.task
    def tick() -> None: ...

    world.app.broker.declare("default")
    return world.app.schedules


def declares(world: World) -> Schedules:
    """The app has the task, and a schedule of it."""
    schedules = has_task(world)
    world.app.schedule("tick", world.app.tasks[NAME].s(), every=HOUR, missed="all")
    return schedules


def worker(world: World) -> Runner:
    """A worker that has looked at the store three times, as a new one does."""
    runner = world.app.schedules.runner("worker")
    runner._dice = random.Random(5)
    for _ in range(3):
        runner._look_at = 0.0
        runner.turn()
    return runner


def leave_open(world: World, name: str = NAME) -> None:
    """Two hours ago it was due; a worker made the first occurrence, and died before it sent it."""
    at = store_of(world).now() // HOUR * HOUR - 2 * HOUR
    made = Made(at, f"{name}@open", at, by="dead")

    def late(view: View) -> tuple[Schedule, list[Made]]:
        return replace(view.schedule, watermark=at), [made]

    assert engine_of(world).transact(name, late)


def sent(world: World) -> set[str]:
    """The ids of the tasks in the queue of the world's broker."""
    found = world.app.broker.peek("default", limit=100)
    return {world.app.codec.from_envelope(each.envelope, "default").id for each in found}


def of_schedule_engine(mine: World, theirs: World) -> None:
    declares(mine)
    worker(mine)
    leave_open(mine)
    has_task(theirs)
    engine = engine_of(theirs)
    assert list(engine.views()) == []
    assert engine.view(NAME) is None
    assert [(name, owner) for name, _, owner in engine.others()] == [(NAME, mine.owner)]
    view = engine_of(mine).view(NAME)
    assert view is not None
    assert engine.fire(view, "theirs") is None
    assert engine.adopt(view) is None
    assert engine.change(NAME, lambda view: replace(view.schedule, made=99)) is None
    assert engine.history(NAME, 10) == []
    assert engine_of(mine).view(NAME) == view
    runner = worker(theirs)
    assert runner._watched == {}
    assert sent(theirs) == set()
    worker(mine)
    assert f"{NAME}@open" in sent(mine)


def of_schedules(mine: World, theirs: World) -> None:
    has_task(mine).create("tick", mine.app.tasks[NAME].s(), every=HOUR)
    other = has_task(theirs)
    assert other.view("tick") is None
    assert not other.pause("tick")
    assert not other.resume("tick")
    assert other.trigger("tick") is None
    assert not other.delete("tick")
    other.create("tick", theirs.app.tasks[NAME].s(), every=2 * HOUR)
    ids = [other.trigger("tick"), mine.app.schedules.trigger("tick")]
    assert sent(theirs) == {ids[0]}
    assert sent(mine) == {ids[1]}
    assert other.pause("tick")
    view = mine.app.schedules.view("tick")
    assert view is not None
    assert view.schedule.paused_at is None
    assert other.delete("tick")
    assert mine.app.schedules.view("tick") == view


def of_findings(mine: World, theirs: World) -> None:
    declares(mine)
    worker(mine)
    leave_open(mine)
    has_task(theirs)
    assert [each.check for each in schedule_findings(mine.app, mine.store, named=True)] == ["late"]
    for named in (True, False):
        assert list(schedule_findings(theirs.app, theirs.store, named=named)) == []


def of_moves(mine: World, theirs: World) -> None:
    """It moves between the two owners that are named, and nothing of a third."""
    third = store_of(mine).of(replace(mine.owner, app="third"))
    for store in (store_of(mine), third):
        store.commit(NAME, b"mine", None, [Occurrence(f"{1:014d}", b"x", True)])
    assert not move_schedule(store_of(theirs), third, NAME)
    assert move_schedule(third, store_of(theirs), NAME)
    assert third.read(NAME) is None
    kept = store_of(mine).read(NAME)
    assert kept is not None
    assert kept.owner == mine.owner


SCENARIOS: dict[str, Callable[[World, World], None]] = {
    "aztask.operate.findings.schedule_findings": of_findings,
    "aztask.stores.records.schedules.move_schedule": of_moves,
    "aztask.schedules.engine.ScheduleEngine": of_schedule_engine,
    "aztask.schedules.schedules.Schedules": of_schedules,
}
