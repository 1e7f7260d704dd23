"""When a worker does what for schedules: each time by its figure, with chance at its ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from schedulesim import Killed, World, call

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerUnavailable
from aztask.queues.engine import Database
from aztask.schedules.runner import Runner
from aztask.schedules.schedules import Schedules
from aztask.schedules.stored import WAITING, Made
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.schedules import schedules_of
from aztask.support import chance
from aztask.support.chance import SystemChance
from aztask.support.parts import Part

START = 1_800_000_000.0
HOUR = 3600.0
SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")


class Ends(SystemChance):
    """Chance that always gives one end of a range: the first, or the last."""

    def __init__(self, *, last: bool) -> None:
        self._last = last

    def uniform(self, first: float, last: float) -> float:
        return last if self._last else first


@pytest.fixture(params=[False, True], ids=["first", "last"])
def last(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether chance gives the last number of each range."""
    with chance.replaced(Ends(last=request.param)):
        yield request.param


class Remote:
    """A result store that is reached over a network."""

    remote = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(params=[False, True], ids=["near", "remote"])
def remote(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        yield World(LocalResults(database, owner=SHOP), START, random.Random(5))


@pytest.fixture
def either(world: World, remote: bool) -> World:
    """The world with a store on this machine, or with one over a network."""
    if remote:
        world.results = Remote(world.results)
    return world


def code(name: str = "s", **options: Any) -> Any:
    def declare(schedules: Schedules) -> None:
        schedules.declare(schedules.plan(name, call(1), **{"every": HOUR, **options}))  # type: ignore[arg-type]

    return declare


def nothing(schedules: Schedules) -> None:
    """No schedule of the code."""


def turns(world: World, worker: Runner, until: float) -> list[float]:
    """Let the worker take its turns until then, as its process does; returns their times."""
    found = []
    while world.now < until:
        found.append(world.now)
        world.now = min(until, world.now + worker.turn())
    return found


def made_here(world: World, worker: Runner) -> float:
    """Let the worker make the schedule and its first occurrence; returns when that was due."""
    turns(world, worker, START + HOUR + 1.0)
    assert len(world.sent) == 1
    return START + HOUR


def kill_while_sending(world: World, worker: Runner, at: float) -> None:
    """The worker dies behind the commit, before it sends anything."""

    def die(*arguments: Any) -> None:
        raise Killed

    sends = worker._engine._sends
    send, sends.send_occurrence = sends.send_occurrence, die  # type: ignore[method-assign]
    world.now = at
    with pytest.raises(Killed):
        worker.turn()
    sends.send_occurrence = send  # type: ignore[method-assign]


# -- how long a worker waits -----------------------------------------------------------------------


def test_an_idle_worker_takes_a_turn_each_second(world: World) -> None:
    worker = world.worker("a", nothing)
    assert [worker.turn() for _ in range(2)] == [1.0, 1.0]
    world.now += 1.75
    assert worker.turn() == 0.25, "the next look at all schedules"
    world.now += 0.25
    assert worker.turn() == 1.0


def test_a_worker_is_there_when_its_schedule_is_due(world: World) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    world.now = due - 100.0
    worker.turn()
    world.now = due - 0.5
    assert worker.turn() == 0.5
    world.now = due
    assert worker.turn() == 1.0
    assert len(world.sent) == 2, "at its very time"


def test_one_that_did_not_make_the_last_occurrence_waits_for_its_stagger(
    either: World, remote: bool, last: bool
) -> None:
    due = made_here(either, either.worker("a", code())) + HOUR
    stagger = ((2.0, 15.0) if remote else (1.0, 5.0))[last]
    other = either.worker("b", code())
    either.now = due - 100.0
    turns(either, other, due + stagger - 0.25)
    assert len(either.sent) == 1
    assert other.turn() == 0.25
    either.now += 0.25
    other.turn()
    assert len(either.sent) == 2
    assert either.by("b") == 1
    either.now = due + HOUR - 1.0
    turns(either, other, due + HOUR + 0.25)
    assert len(either.sent) == 3, "now it is the one that makes them, and at once"


def test_what_is_paused_or_has_no_next_time_is_not_waited_for(world: World) -> None:
    schedules = world.schedules()
    schedules.create("s", call(1), every=HOUR)
    schedules.create("past", call(1), at=datetime(2026, 1, 1, tzinfo=UTC))
    schedules.pause("s")
    worker = world.worker("a", nothing)
    worker.turn()
    world.now = START + 2 * HOUR
    for _ in range(2):
        assert worker.turn() == 1.0
    assert not world.made


def test_one_that_fails_is_tried_again_after_five_seconds_without_haste(world: World) -> None:
    schedules = world.schedules(code())
    part = Part("schedules", listed=False)
    worker = schedules.runner("a", part=part)
    due = made_here(world, worker) + HOUR
    turns(world, worker, due - 1.0)
    sends = worker._engine._sends
    send, tried = sends.send_occurrence, []

    def fail(*arguments: Any) -> None:
        tried.append(world.now)
        raise ValueError("the broker says no")

    sends.send_occurrence = fail  # type: ignore[method-assign]
    before = part.failures
    waits = turns(world, worker, due + 17.0)
    first, second, third = tried
    assert first == due
    assert 10.0 < second - due <= 11.0, "its own occurrence is sent again after ten seconds"
    assert third - second == 5.0
    assert len(waits) <= 40
    assert before == []
    ((name, reason),) = [(each.part, each.reason) for each in part.failures]
    assert (name, reason) == ("schedule shop.s", "ValueError: the broker says no")
    sends.send_occurrence = send  # type: ignore[method-assign]
    turns(world, worker, due + 22.0)
    assert len(world.sent) == 2
    assert part.failures == []


def test_one_that_fails_before_it_is_made_is_tried_each_five_seconds(world: World) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due - 1.0)
    engine, tried = worker._engine, []

    def fail(*arguments: Any) -> None:
        tried.append(world.now)
        raise ValueError("no")

    engine.fire = fail  # type: ignore[method-assign,assignment]
    waits = turns(world, worker, due + 12.0)
    assert tried == [due, due + 5.0, due + 10.0]
    assert len(waits) <= 25, "it does not turn round and round"


# -- new schedules ---------------------------------------------------------------------------------


def test_a_new_schedule_of_the_code_waits_so_that_one_worker_makes_it(
    either: World, remote: bool, last: bool
) -> None:
    worker = either.worker("a", code())
    wait = (5.0 if remote else 0.5) if last else 0.0
    assert worker.turn() == pytest.approx(max(0.01, min(1.0, wait)))
    assert either.schedules().view("s") is None
    if wait:
        turns(either, worker, START + wait - 0.05)
        assert either.schedules().view("s") is None
    either.now = START + wait
    worker.turn()
    view = either.schedules().view("s")
    assert view is not None
    assert (view.schedule.by, view.schedule.of_code) == ("a", True)
    (claim,) = view.claims
    assert (claim.first_at, claim.seen_at) == (START, START + wait), "it is as old as its worker"


@pytest.mark.parametrize(("remote", "seconds"), [(False, 2.0), (True, 30.0)], indirect=["remote"])
def test_schedules_are_looked_at_now_and_then(either: World, seconds: float) -> None:
    worker, looks = either.worker("a", nothing), []
    store = worker._engine.store
    overview = store.overview
    store.overview = lambda **options: (looks.append(either.now), overview(**options))[1]  # type: ignore[method-assign]
    turns(either, worker, START + 3.5 * seconds)
    assert looks == [START + number * seconds for number in range(4)]


def test_what_was_made_deleted_or_changed_at_run_time_is_noticed(world: World) -> None:
    worker, schedules = world.worker("a", nothing), world.schedules()
    worker.turn()
    schedules.create("s", call(1), every=60.0)
    turns(world, worker, START + 70.0)
    assert len(world.sent) == 1
    schedules.create("s", call(1), every=HOUR)
    turns(world, worker, START + 200.0)
    assert len(world.sent) == 1
    schedules.create("s", call(1), every=60.0)
    turns(world, worker, START + 241.0)
    assert [each[-4:-1] for each in world.sent] == [":00"] * 3, "at 1, 3 and 4 minutes"
    schedules.delete("s")
    turns(world, worker, START + 400.0)
    assert len(world.sent) == 3


def test_one_that_is_deleted_right_before_it_is_due_is_not_made(world: World) -> None:
    first = world.worker("a", code())
    due = made_here(world, first) + HOUR
    other = world.worker("b", nothing)
    world.now = due + 0.5
    other.turn()
    world.schedules().delete("s")
    for _ in range(20):
        world.now += 0.25
        other.turn()
    assert len(world.sent) == 1


def test_a_single_worker_meets_no_other_writer(world: World) -> None:
    worker = world.worker("a", code(every=60.0, overlap="queue"))
    turns(world, worker, START + 600.0)
    assert len(world.sent) >= 9
    assert [each.conflicts for each in world.engines] == [0]
    assert set(world.sent.values()) == {1}


def far(world: World) -> World:
    """The world with a store over a network, where looks at all schedules are 30 seconds apart."""
    world.results = Remote(world.results)
    return world


def test_what_a_worker_makes_or_adopts_is_watched_before_the_next_look(
    tmp_path: Path, world: World
) -> None:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        before = World(LocalResults(database, owner=NO_OWNER), START, random.Random(5))
        before.schedules().create("old", call(1), every=10.0)
    worker = far(world).worker("a", code(every=10.0))
    with chance.replaced(Ends(last=False)):
        turns(world, worker, START + 13.0)
    assert sorted(each.partition("@")[0] for each in world.sent) == ["shop.old", "shop.s"]


def test_one_without_an_owner_that_another_process_adopts_first_is_no_error(
    tmp_path: Path, world: World
) -> None:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        before = World(LocalResults(database, owner=NO_OWNER), START, random.Random(5))
        before.schedules().create("s", call(1), every=HOUR)
    worker = world.worker("a", nothing)
    worker._engine.adopt = lambda view: None  # type: ignore[method-assign]
    assert worker.turn() == 1.0
    assert not world.made


def test_between_two_looks_a_worker_reads_nothing(world: World) -> None:
    worker = far(world).worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due + 1.0)
    assert len(world.sent) == 2
    worker._look_at = due + 60.0
    store, asked = worker._engine.store, []
    for name in ("read", "overview", "newest"):
        setattr(store, name, lambda *given, name=name, **options: asked.append(name))
    turns(world, worker, due + 40.0)
    assert asked == [], "what it sent is not looked at again"


def test_a_definition_that_cannot_be_read_for_a_moment_stops_no_worker(world: World) -> None:
    schedules = world.schedules(code())
    part = Part("schedules", listed=False)
    worker = schedules.runner("a", part=part)
    due = made_here(world, worker) + HOUR
    turns(world, worker, due)
    engine = worker._engine
    next_due = engine.next_due

    def fail(view: Any) -> Any:
        raise ValueError("not now")

    engine.next_due = fail  # type: ignore[method-assign]
    worker.turn()
    assert part.aside() == ["schedule shop.s"]
    engine.next_due = next_due  # type: ignore[method-assign]
    turns(world, worker, due + 16.0)
    assert len(world.sent) == 2, "what it had made is sent"
    assert part.aside() == []


# -- claims ----------------------------------------------------------------------------------------


def seen_at(world: World) -> float:
    view = world.schedules().view("s")
    assert view is not None
    (claim,) = view.claims
    return claim.seen_at


def test_the_worker_that_makes_occurrences_renews_its_claim_after_two_minutes(
    world: World,
) -> None:
    worker = world.worker("a", code())
    turns(world, worker, START + 1.0)
    claimed = seen_at(world)
    worker._look_at = claimed + 120.0
    turns(world, worker, claimed + 121.0)
    assert seen_at(world) == claimed
    turns(world, worker, claimed + 123.0)
    assert claimed + 120.0 < seen_at(world) <= claimed + 123.0


def test_others_renew_it_one_to_three_minutes_later(world: World, last: bool) -> None:
    made_here(world, world.worker("a", code()))
    claimed = seen_at(world)
    other = world.worker("b", code())
    age = 300.0 if last else 180.0
    world.now = claimed + 1.0
    turns(world, other, claimed + age)
    assert seen_at(world) == claimed
    turns(world, other, claimed + age + 3.0)
    assert claimed + age < seen_at(world) <= claimed + age + 3.0


def test_a_claim_that_has_ended_is_made_anew_as_old_as_its_worker(world: World) -> None:
    worker = world.worker("a", code())
    turns(world, worker, START + 1.0)
    world.now += 700.0
    turns(world, worker, world.now + 3.0)
    view = world.schedules().view("s")
    assert view is not None
    (claim,) = view.claims
    assert claim.first_at == START
    assert claim.seen_at >= START + 700.0
    assert view.state_at(world.now) == "active"


def test_code_without_the_schedule_claims_nothing(world: World) -> None:
    turns(world, world.worker("a", code()), START + 1.0)
    claimed = seen_at(world)
    turns(world, world.worker("b", nothing), START + 700.0)
    assert seen_at(world) == claimed


# -- what others left ------------------------------------------------------------------------------


def test_a_worker_sends_its_own_occurrence_again_after_ten_seconds(world: World) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due)
    kill_while_sending(world, worker, due)
    again = world.worker("a", code())  # the same name, as after a restart
    turns(world, again, due + 10.0)
    assert len(world.sent) == 1
    world.now = due + 10.0
    again.turn()
    assert len(world.sent) == 1
    world.now = due + 10.25
    again.turn()
    assert len(world.sent) == 2


def test_another_worker_waits_for_its_stagger_on_top(world: World, last: bool) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due)
    kill_while_sending(world, worker, due)
    other = world.worker("b", code())
    stagger = 5.0 if last else 1.0
    turns(world, other, due + 10.0 + stagger)
    other.turn()
    assert len(world.sent) == 1
    world.now = due + 10.25 + stagger
    other.turn()
    assert len(world.sent) == 2
    assert set(world.sent.values()) == {1}


def test_what_its_maker_has_sent_meanwhile_is_not_sent_again(world: World) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due)
    kill_while_sending(world, worker, due)
    other = world.worker("b", code())
    other.turn()  # it has seen the open occurrence
    view = world.schedules().view("s")
    assert view is not None
    worker._engine.send(view, view.open[0])
    for _ in range(80):
        world.now += 0.25
        other.turn()
    assert set(world.sent.values()) == {1}


@pytest.mark.parametrize(("remote", "wait"), [(False, 1.0), (True, 5.0)], indirect=["remote"])
def test_a_waiting_occurrence_is_asked_for_now_and_then(either: World, wait: float) -> None:
    either.ends = False
    worker = either.worker("a", code(overlap="queue"))
    due = made_here(either, worker) + HOUR
    turns(either, worker, due + 2.0 * wait)
    asked = []
    runs = worker._engine.runs
    worker._engine.runs = lambda *of: (asked.append(either.now), runs(*of))[1]  # type: ignore[method-assign]
    began = either.now
    while either.now < began + 8.0 * wait:
        worker.turn()
        either.now += 0.125
    assert len(asked) == 8
    assert {later - one for one, later in itertools.pairwise(asked)} == {wait}


def test_a_waiting_occurrence_of_a_silent_worker_goes_by_another_one(
    world: World, last: bool
) -> None:
    world.ends = False
    worker = world.worker("a", code(overlap="queue"))
    due = made_here(world, worker) + HOUR
    turns(world, worker, due + 1.0)
    world.end("shop.s@2027-01-15T09:00:00Z")
    other = world.worker("b", code(overlap="queue"))
    sent_at = float(due - HOUR)
    view = world.schedules().view("s")
    assert view is not None
    assert (view.waiting, view.schedule.last_at) == (1, sent_at)
    turns(world, other, due + 3.0)
    assert len(world.sent) == 2, "its worker last made one an hour ago"


def test_one_whose_worker_may_still_admit_it_is_left_to_that_worker(
    world: World, last: bool
) -> None:
    """For the longest stagger and that of this worker, from the last occurrence on."""
    world.ends = False
    made_at = made_here(world, world.worker("a", code(overlap="queue")))
    one = Made(made_at + 1.0, "shop.s@waits", made_at + 1.0, state=WAITING, by="a")
    engine = world.schedules().engine
    assert engine.transact("shop.s", lambda view: (view.schedule, [one])) is not None
    world.end("shop.s@2027-01-15T09:00:00Z")
    other, sent_at = world.worker("b", code(overlap="queue")), None
    while sent_at is None and world.now < made_at + 20.0:
        other.turn()
        if "shop.s@waits" in world.sent:
            sent_at = world.now
        world.now += 0.25
    assert sent_at == made_at + (11.0 if last else 7.0), "it looks once a second"


# -- errors ----------------------------------------------------------------------------------------


def test_while_the_store_cannot_list_them_known_schedules_go_on(world: World) -> None:
    worker = world.worker("a", code())
    due = made_here(world, worker) + HOUR
    turns(world, worker, due - 1.0)
    store = worker._engine.store

    def fail(**options: Any) -> Any:
        raise BrokerUnavailable("no answer")

    overview, store.overview = store.overview, fail  # type: ignore[method-assign]
    while world.now < due + 2.0:
        with suppress(BrokerUnavailable):
            worker.turn()
        world.now += 0.5
    assert len(world.sent) == 2
    store.overview = overview  # type: ignore[method-assign]
    with pytest.raises(BrokerUnavailable):
        store.overview = fail  # type: ignore[method-assign]
        worker._look_at = 0.0
        worker.turn()


def test_damaged_and_wrong_ones_are_put_aside_until_they_work_or_are_gone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = world.schedules(code())
    for name in ("a", "b", "t"):
        schedules.create(name, call(1), every=HOUR)
    store = schedules_of(world.results)
    assert store is not None
    (kept,) = [each for each in store.overview() if each.head.schedule == "shop.a"]
    assert store.commit("shop.a", b"\xc1", kept.head.tag) is not None
    schedules.engine.change("shop.b", lambda view: replace(view.schedule, template=b"damaged"))
    part = Part("schedules", listed=False)
    worker = schedules.runner("w", part=part)
    turns(world, worker, START + 20.0)
    assert sorted(part.aside()) == ["schedule shop.a", "schedule shop.b"]
    assert caplog.text.count("schedule shop.a: ") == 1, "it is logged once"
    assert caplog.text.count("; it is tried again") == 2
    turns(world, worker, START + HOUR + 6.0)
    assert len(world.sent) == 2, "those behind them go on"
    schedules.delete("a")
    schedules.create("b", call(2), every=HOUR)
    turns(world, worker, world.now + 5.0)
    assert part.aside() == []


def test_one_that_cannot_be_claimed_stays_aside_although_it_runs(world: World) -> None:
    schedules = world.schedules(code())
    part = Part("schedules", listed=False)
    worker = schedules.runner("w", part=part)
    turns(world, worker, START + 1.0)
    engine = worker._engine

    def fail(*arguments: Any) -> Any:
        raise ValueError("no claim")

    claim, engine.claim = engine.claim, fail  # type: ignore[method-assign]
    turns(world, worker, START + 200.0)
    assert part.aside() == ["schedule shop.s"]
    engine.claim = claim  # type: ignore[method-assign]
    turns(world, worker, START + 210.0)
    assert part.aside() == []


def test_several_without_an_owner_are_adopted_in_one_look(tmp_path: Path, world: World) -> None:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        before = World(LocalResults(database, owner=NO_OWNER), START, random.Random(5))
        for name in ("a", "b", "c"):
            before.schedules().create(name, call(1), every=HOUR)
    worker = world.worker("w", nothing)
    worker.turn()
    engine = world.schedules().engine
    assert {engine.view(f"shop.{name}").owner for name in "abc"} == {SHOP}  # type: ignore[union-attr]
    turns(world, worker, START + HOUR + 6.0)
    assert len(world.sent) == 3
