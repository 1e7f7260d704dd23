"""Rolling deploys, and two owners on one store: workers that take turns on an injected clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedulesim import World, call

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.schedules.runner import Runner
from aztask.schedules.schedules import Schedules
from aztask.schedules.stored import read_made
from aztask.schedules.view import LIVES_SECONDS, View
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.schedules import schedules_of

START = 1_800_000_000.0
HOUR = 3600.0
STEP = (5.0, 10.0)
SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")
STAGING = Owner("servicebus://staging.servicebus.windows.net", "shop")
Declare = Callable[[Schedules], None]


@contextmanager
def world_of(path: Path, owner: Owner, seed: int = 5, deaths: float = 0.0) -> Iterator[World]:
    database = Database(str(path / "results.db"))
    try:
        yield World(LocalResults(database, owner=owner), START, random.Random(seed), deaths)
    finally:
        database.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_of(tmp_path, SHOP) as made:
        yield made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[World]:
    """Another owner on the same store, whose app has the same name."""
    with world_of(tmp_path, STAGING, 6) as made:
        yield made


def code(argument: int = 1, **options: Any) -> Declare:
    options = {"every": HOUR, "missed": "all", "max_missed": 1000, **options}

    def declare(schedules: Schedules) -> None:
        schedules.declare(schedules.plan("s", call(argument), **options))

    return declare


OLD, NEW = code(1), code(2)


def head(world: World) -> View:
    found = world.schedules().view("s")
    assert found is not None
    return found


def times(world: World) -> list[float]:
    """The hours after START of the occurrences that were made, in order."""
    return sorted((float(each[-14:]) / 1000 - START) / HOUR for each in world.made)


def argument(world: World) -> Any:
    """What the code in the head passes."""
    view, engine = head(world), world.schedules().engine
    (found,) = engine._codec.decode_arguments(engine.definition(view).message)[0]
    return found


def test_an_old_worker_that_restarts_during_a_rollout_changes_nothing(world: World) -> None:
    old = [world.worker(f"old-{n}", OLD) for n in range(2)]
    world.run(old, 60.0, STEP)
    new = [world.worker("new", NEW)]
    world.run(old + new, 60.0, STEP)
    assert argument(world) == 2
    restarted = world.worker("restarted", OLD)
    world.run([*old, *new, restarted], 2 * HOUR, STEP)
    assert argument(world) == 2


def test_a_definition_yields_ten_minutes_after_its_last_worker(world: World) -> None:
    old, new = world.worker("old", OLD), world.worker("new", NEW)
    world.run([old], 60.0, STEP)
    world.run([new], 60.0, STEP)
    assert argument(world) == 2
    world.run([old], LIVES_SECONDS - 300.0, STEP)
    assert argument(world) == 2, "the new code may only be restarting"
    world.run([old], 400.0, STEP)
    assert argument(world) == 1


def test_no_claim_of_a_definition_is_renewed_by_workers_that_have_another(world: World) -> None:
    world.run([world.worker("new", code(2, release=5))], 60.0, STEP)
    world.run([world.worker("old", OLD)], LIVES_SECONDS + 120.0, STEP)
    assert argument(world) == 1, "release 5 has no worker left"


def test_the_higher_release_counts_however_late_the_other_starts(world: World) -> None:
    high = world.worker("high", code(2, release=1))
    world.run([high], 60.0, STEP)
    world.run([high, world.worker("low", OLD)], HOUR, STEP)
    assert argument(world) == 2


def test_a_worker_that_was_frozen_for_an_hour_is_as_old_as_before(world: World) -> None:
    frozen = world.worker("frozen", OLD)
    world.run([frozen], 60.0, STEP)
    new = world.worker("new", NEW)
    world.run([new], HOUR, STEP)
    world.run([frozen, new], HOUR, STEP)
    assert argument(world) == 2


def test_the_only_worker_may_be_frozen_and_goes_on(world: World) -> None:
    worker = world.worker("a", OLD)
    world.run([worker], HOUR + 60.0, STEP)
    world.now += 3 * HOUR
    world.run([worker], HOUR, STEP)
    assert times(world) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_damaged_claim_is_replaced(world: World) -> None:
    world.run([world.worker("a", OLD)], 60.0, STEP)
    store = schedules_of(world.results)
    assert store is not None
    (kept,) = store.overview()
    assert store.claim("shop.s", replace(kept.claims[0], data=b"\xc1"))
    world.run([world.worker("b", OLD)], 60.0, STEP)
    assert head(world).state_at(world.now) == "active"


def test_claims_that_ended_are_deleted(world: World) -> None:
    for number in range(6):
        world.run([world.worker(f"w{number}", code(number))], 2 * HOUR, STEP)
    store = schedules_of(world.results)
    assert store is not None
    (kept,) = store.overview()
    assert len(kept.claims) <= 2


def test_a_flip_and_back_between_two_occurrences_loses_none(world: World) -> None:
    """The other code moves the hour by half; it is back before that time comes."""
    moved = code(1, cron="30 * * * *", every=None)
    old = world.worker("old", OLD)
    world.run([old], 2 * HOUR - 60.0, STEP)
    new = world.worker("new", moved)
    world.run([new], 120.0, STEP)  # 2.0 passes, and belongs to no definition that was there then
    assert head(world).schedule.digest == best_digest(world, moved)
    world.run([world.worker("again", code(1, release=1))], 120.0, STEP)
    assert times(world) == [1.0, 2.0]


def test_a_flip_and_back_behind_an_occurrence_doubles_none(world: World) -> None:
    moved = code(1, cron="30 * * * *", every=None)
    world.run([world.worker("old", OLD)], 2 * HOUR - 60.0, STEP)
    world.run([world.worker("new", moved)], 0.5 * HOUR + 120.0, STEP)
    assert times(world) == [1.0, 2.5]
    world.run([world.worker("again", code(1, release=1))], HOUR, STEP)
    assert times(world) == [1.0, 2.5, 3.0], "2.5 replaced 2.0"


def test_what_is_due_by_the_old_definition_is_sent_by_the_worker_that_changes_it(
    world: World,
) -> None:
    world.run([world.worker("old", OLD)], HOUR - 10.0, STEP)
    world.now = START + HOUR + 1.0  # due, and no worker has made it
    world.run([world.worker("new", code(2, every=2 * HOUR))], 5.0, (1.0, 1.0))
    assert times(world) == [1.0]
    assert len(world.sent) == 1


def test_more_is_due_than_one_transaction_takes(world: World) -> None:
    """Four minutes of an outage, every second: 240 occurrences before the definition changes."""
    world.run([world.worker("old", code(1, every=1))], 60.0, (0.5, 1.0))
    made = len(world.made)
    world.now += 240.0
    world.run([world.worker("new", code(2, every=60))], 30.0, (0.5, 1.0))
    assert 238 <= len(world.made) - made <= 243
    assert len(set(world.made)) == len(world.made)


def best_digest(world: World, declare: Declare) -> str:
    schedules = world.schedules(declare)
    return schedules._definition(schedules.declared["shop.s"]).digest


def test_pausing_forgets_where_a_definition_left(world: World) -> None:
    moved = code(1, cron="30 * * * *", every=None)
    world.run([world.worker("old", OLD)], 60.0, STEP)
    world.run([world.worker("new", moved)], 60.0, STEP)
    assert world.schedules().pause("s")
    world.now += 3 * HOUR
    assert world.schedules().resume("s")
    world.run([world.worker("again", code(1, release=1))], HOUR, STEP)
    assert times(world) == [4.0], "the times of the pause are skipped"


@pytest.mark.parametrize("seed", range(12))
def test_rollouts_that_flip_and_die_make_every_occurrence_once(tmp_path: Path, seed: int) -> None:
    """Five workers; every few minutes a part of them gets the other code, or all do."""
    with world_of(tmp_path, SHOP, seed, deaths=0.1) as world:
        dice = random.Random(seed)
        codes = [code(number, every=600.0) for number in (1, 2)]
        agains = [world.again(each) for each in codes]
        running = [0] * 5
        workers: list[Runner] = [agains[0](index) for index in range(5)]
        for _ in range(40):
            target = dice.randrange(2)
            for index in dice.sample(range(5), dice.randrange(6)):
                running[index] = target
                workers[index] = agains[target](index)

            def again(index: int) -> Runner:
                return agains[running[index]](index)

            workers = world.run(workers, dice.uniform(60.0, 900.0), (2.0, 15.0), again)
        world.deaths = 0.0
        workers = world.run(workers, 200.0, STEP)
        made = [(float(each[-14:]) / 1000 - START) / 600.0 for each in world.made]
        assert len(set(made)) == len(made)
        assert sorted(made) == [made[0] + number for number in range(len(made))]
        assert made[0] <= 3
        assert (world.now - START) / 600.0 - max(made) < 2
        assert len(world.sent) == len(made), "each is sent, under one id"
        assert world.kills > 5


@pytest.mark.parametrize("seed", range(6))
def test_two_owners_of_one_name_never_meet(tmp_path: Path, seed: int) -> None:
    with (
        world_of(tmp_path, SHOP, seed, deaths=0.05) as shop,
        world_of(tmp_path, STAGING, seed + 100, deaths=0.05) as staging,
    ):
        agains = [world.again(code(number)) for number, world in enumerate((shop, staging), 1)]
        worlds = (shop, staging)
        fleets = [[again(0), again(1)] for again in agains]
        for _ in range(60):
            for number, world in enumerate(worlds):
                fleets[number] = world.run(fleets[number], 600.0, (20.0, 60.0), agains[number])
        for number, world in enumerate(worlds):
            world.deaths = 0.0
            world.run(fleets[number], 600.0, STEP)
            assert len(set(world.made)) == len(world.made)
            first = times(world)[0]
            assert times(world) == [first + hour for hour in range(len(world.made))]
            assert len(world.made) >= 9
            assert set(world.arguments.values()) == {(number + 1,)}
        assert not set(shop.sent) & set(staging.sent)
        marked = [world for world in worlds if all("~" in each for each in world.sent)]
        assert len(marked) == 1, "the first owner of the name keeps plain ids"


def test_workers_of_another_owner_leave_a_schedule_alone(world: World, other: World) -> None:
    first = world.worker("a", OLD)
    world.run([first], HOUR + 60.0, STEP)
    other.now = world.now
    other.run([other.worker("b", lambda schedules: None)], 5 * HOUR, STEP)
    assert not other.sent
    assert not other.made
    assert not list(other.schedules().engine.views())
    ((name, _, owner),) = other.schedules().engine.others()
    assert (name, owner) == ("shop.s", SHOP)
    assert other.schedules().view("s") is None
    assert not other.schedules().pause("s")
    assert not other.schedules().delete("s")
    world.now = other.now
    world.run([world.worker("again", OLD)], 60.0, STEP)
    assert times(world) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_schedule_without_an_owner_is_adopted_with_its_ids_and_its_history(
    tmp_path: Path, world: World, other: World
) -> None:
    with world_of(tmp_path, NO_OWNER) as before:
        before.run([before.worker("a", OLD)], 2 * HOUR + 60.0, STEP)
        assert before.schedules().pause("s")
        world.now = other.now = before.now
        other.run([other.worker("b", lambda schedules: None)], 60.0, STEP)
        world.run([world.worker("a", OLD)], 60.0, STEP)
        assert head(world).schedule.paused_at is not None
        assert head(world).owner == SHOP
        assert head(world).mark == ""
        assert world.schedules().resume("s")
        world.run([world.worker("a", OLD)], HOUR, STEP)
        assert [each for each in world.sent if "~" in each] == []
        assert times(world) == [3.0]
        assert before.schedules().view("s") is None


def test_a_worker_that_is_slower_to_adopt_a_schedule_claims_nothing_before_it_looks_again(
    tmp_path: Path, world: World
) -> None:
    with world_of(tmp_path, NO_OWNER) as before:
        before.run([before.worker("a", OLD)], 60.0, STEP)
        world.now = before.now
    worker = world.worker("b", OLD)
    engine, tries, claims = worker._engine, [], []
    adopt, claim = engine.adopt, engine.claim

    def slower(view: View) -> View | None:
        tries.append(world.now)
        return None if len(tries) < 3 else adopt(view)

    def claimed(*arguments: Any) -> bool:
        claims.append(len(tries))
        return claim(*arguments)

    engine.adopt, engine.claim = slower, claimed  # type: ignore[method-assign]
    world.run([worker], 60.0, STEP)
    assert len(tries) == 3
    assert set(claims) == {3}
    assert head(world).owner == SHOP


def test_one_that_was_made_at_run_time_is_adopted_by_the_app_that_has_its_task(
    tmp_path: Path, world: World, other: World
) -> None:
    with world_of(tmp_path, NO_OWNER) as before:
        before.schedules().create("s", call(1), every=HOUR)
    other.tasks = {"staging.work": None}
    other.run([other.worker("b", lambda schedules: None)], 3 * HOUR, STEP)
    assert not other.sent
    world.run([world.worker("a", lambda schedules: None)], 3 * HOUR + 60.0, STEP)
    assert len(world.sent) >= 1
    assert head(world).owner == SHOP


def test_one_name_with_a_dot_in_two_apps_belongs_to_the_app_that_has_the_task(
    tmp_path: Path, world: World, other: World
) -> None:
    def shared(schedules: Schedules) -> None:
        schedules.declare(schedules.plan("shared.s", call(1), every=HOUR))

    with world_of(tmp_path, NO_OWNER) as before:
        before.run([before.worker("a", shared)], HOUR + 60.0, STEP)
        world.now = other.now = before.now
    other.tasks = {"staging.work": None}  # it declares that name, with a task of its own
    other.run([other.worker("b", shared)], HOUR, STEP)
    world.run([world.worker("a", shared)], HOUR, STEP)
    assert list(world.sent) == ["shared.s@2027-01-15T10:00:00Z"]
    assert list(other.sent) == [f"shared.s~{STAGING.mark}@2027-01-15T10:00:00Z"]


def test_a_definition_of_an_older_release_yields_to_one_with_a_claim(world: World) -> None:
    """Releases before 0.2 write only `claimed_at` into the head."""
    world.run([world.worker("a", NEW)], 60.0, STEP)
    engine = world.schedules(OLD).engine
    old = world.schedules(OLD)._definition(world.schedules(OLD).declared["shop.s"])
    view = head(world)
    assert engine.define(old, 0, "old", view, of_code=True)
    assert engine.change("shop.s", lambda view: replace(view.schedule, claimed_at=world.now))
    world.run([world.worker("b", NEW)], 60.0, STEP)
    assert argument(world) == 2
    assert engine.define(old, 7, "old", head(world), of_code=True)
    assert engine.change("shop.s", lambda view: replace(view.schedule, claimed_at=world.now))
    worker = world.worker("c", NEW)
    world.run([worker], 60.0, STEP)
    assert argument(world) == 1, "its release is higher"
    world.run([worker], LIVES_SECONDS + 60.0, STEP)
    assert argument(world) == 2, "no worker of the older release is left"


def test_occurrences_keep_their_states_through_rollouts(world: World) -> None:
    for number in range(8):
        world.run([world.worker(f"w{number}", code(number % 2))], HOUR, STEP)
    store = schedules_of(world.results)
    assert store is not None
    assert {read_made(row).state for row in store.newest("shop.s", 100)} == {"sent"}
