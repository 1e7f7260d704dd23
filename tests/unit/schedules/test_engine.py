"""The engine of schedules: what each of its changes returns, keeps, sends and reports."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedulesim import World, call

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import MessageTooLarge, QueueNotFound
from aztask.message.codec import Codec
from aztask.queues.engine import Database
from aztask.schedules import engine as module
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.rules import jitter_of
from aztask.schedules.schedules import Schedules
from aztask.schedules.view import Claim, View, read_claim
from aztask.stores.records.base import RunKey, RunRecord, State
from aztask.stores.records.local.store import LocalResults

START = 1_800_000_000.0
HOUR = 3600.0
SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        yield World(LocalResults(database, owner=SHOP), START, random.Random(5))


class Site:
    """One schedule "s" that was made at run time, and its engine."""

    def __init__(self, world: World, codec: Codec | None = None, **options: Any) -> None:
        self.world = world
        self.schedules: Schedules = world.schedules(codec=codec)
        self.engine: ScheduleEngine = self.schedules.engine
        self.schedules.create("s", call(1), **{"every": HOUR, **options})  # type: ignore[arg-type]

    @property
    def view(self) -> View:
        found = self.engine.view("shop.s")
        assert found is not None
        return found

    def fire(self, at: float) -> View:
        """Make what is due at that time."""
        self.world.now = at
        found = self.engine.fire(self.view, "me")
        assert found is not None
        return found

    def definition(self, **options: Any) -> Any:
        """The definition of the schedule with these options."""
        schedules = self.world.schedules()
        return schedules._definition(schedules.plan("s", call(1), **options))

    def define(self, definition: Any, by: str = "me") -> View:
        """Replace the definition."""
        found = self.engine.define(definition, 0, by, self.view, of_code=False)
        assert found is not None
        return found


# -- what a change returns -------------------------------------------------------------------------


def test_a_view_after_a_change_is_the_one_that_the_store_has(world: World) -> None:
    site = Site(world, overlap="queue")
    world.ends = False
    view = site.fire(START + HOUR)
    assert view == site.view
    assert [each.state for each in view.open] == ["due"]
    sent = site.engine.send(view, view.open[0])
    assert sent.state == "sent"
    assert site.view.open == ()
    view = site.fire(START + 2 * HOUR)
    assert view == site.view
    assert [each.state for each in view.open] == ["waiting"]
    made = site.engine.transact(
        "shop.s",
        lambda found: (replace(found.schedule, made=50), [replace(view.open[0], at=world.now + 1)]),
    )
    assert made == site.view
    assert made.schedule.made == 50
    changed = site.engine.change("shop.s", lambda found: replace(found.schedule, made=51))
    assert changed == site.view
    defined = site.define(site.definition(every=2 * HOUR))
    assert defined == site.view
    assert defined.schedule.digest == site.definition(every=2 * HOUR).digest


def test_an_edit_that_wants_no_change_writes_none(world: World) -> None:
    site = Site(world)
    before = site.view
    assert site.engine.change("shop.s", lambda view: None) == before == site.view
    assert site.engine.change("shop.unknown", lambda view: None) is None


def test_a_stale_view_changes_nothing_and_counts_as_a_conflict(world: World) -> None:
    site = Site(world, overlap="queue")
    stale = site.view
    site.engine.change("shop.s", lambda view: replace(view.schedule, made=9))
    current = site.view
    world.now = START + HOUR
    assert site.engine.fire(stale, "me") is None
    assert site.engine.commit(stale, stale.schedule, ()) is None
    assert site.engine.adopt(stale) is None
    definition = site.definition(every=60.0)
    assert site.engine.define(definition, 0, "me", stale, of_code=False) is None
    assert site.engine.conflicts == 4
    assert site.view == current
    assert not world.made


def test_a_name_that_is_taken_is_not_defined_anew(world: World) -> None:
    site = Site(world)
    before = site.view
    other = site.definition(every=60.0)
    assert site.engine.define(other, 0, "me", None, of_code=False) is None
    assert site.view == before


@pytest.mark.parametrize(("of_code", "claimed_at"), [(True, 0.0), (False, None)])
def test_a_new_schedule_begins_now(world: World, of_code: bool, claimed_at: float | None) -> None:
    site = Site(world)
    assert site.schedules.delete("s")
    definition = site.definition(every=60.0)
    view = site.engine.define(definition, 7, "me", None, of_code=of_code)
    assert view is not None
    head = view.schedule
    assert (head.watermark, head.made_at, head.deployed_at) == (START, START, START)
    assert (head.release, head.by, head.claimed_at, head.paused_at) == (7, "me", claimed_at, None)
    assert (head.made, head.last_id, view.owner) == (0, "", SHOP)


def test_a_new_definition_says_when_it_came_and_of_which_release_it_is(world: World) -> None:
    site = Site(world)
    world.now = START + 60.0
    schedules = world.schedules()
    plan = schedules.plan("s", call(2), every=HOUR)
    other = schedules._definition(plan)
    view = site.engine.define(other, 3, "me", site.view, of_code=True)
    assert view is not None
    head = view.schedule
    assert (head.release, head.deployed_at, head.claimed_at) == (3, START + 60.0, 0.0)
    assert head.watermark == START, "its times are the same, so it goes on"
    old = site.engine.change("shop.s", lambda found: replace(found.schedule, claimed_at=77.0))
    assert old is not None
    again = site.engine.define(other, 4, "me", old, of_code=True)
    assert again is not None
    assert again.schedule.claimed_at == 77.0, "workers of older releases renew it"


def test_a_schedule_without_an_owner_becomes_that_of_the_one_that_changes_it(
    tmp_path: Path, world: World
) -> None:
    with closing(Database(str(tmp_path / "results.db"))) as database:
        before = World(LocalResults(database, owner=NO_OWNER), START, random.Random(5))
        for name in ("a", "b", "c"):
            before.schedules().create(name, call(1), every=HOUR)
    engine = world.schedules().engine
    a, b, c = (engine.view(f"shop.{name}") for name in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.owner == NO_OWNER
    changed = engine.commit(a, a.schedule, ())
    assert changed is not None
    assert (changed.owner, changed.tag) == (SHOP, engine.view("shop.a").tag)  # type: ignore[union-attr]
    definition = replace(engine.definition(b), delay=5.0)
    defined = engine.define(definition, 0, "me", b, of_code=False)
    assert defined is not None
    assert defined.owner == SHOP
    adopted = engine.adopt(c)
    assert adopted is not None
    assert (adopted.owner, adopted.schedule) == (SHOP, c.schedule)


# -- what is made, and when it is late -------------------------------------------------------------


@pytest.mark.parametrize(("late", "warned"), [(60.0, False), (60.5, True)])
def test_an_occurrence_that_is_more_than_a_minute_late_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, late: float, warned: bool
) -> None:
    site = Site(world)
    with caplog.at_level(logging.WARNING):
        site.fire(START + HOUR + late)
    assert ("is made" in caplog.text) == warned
    if warned:
        assert "shop.s@2027-01-15T09:00:00Z is made 60 s late" in caplog.text


def test_of_many_missed_occurrences_one_event_counts_those_among_the_last_thousand(
    world: World,
) -> None:
    site = Site(world, every=1.0)
    site.fire(START + 5_000.0)
    (event,) = world.events
    assert event.reason.startswith("schedule shop.s: 999 occurrences missed")
    assert len(world.made) == 1


@pytest.mark.parametrize(
    ("options", "made", "missed"),
    [
        ({}, 1, 2),
        ({"missed": "all"}, 3, 0),
        ({"missed": "all", "max_missed": 3}, 3, 0),
        ({"missed": "all", "max_missed": 2}, 2, 1),
        ({"missed": "all", "grace": HOUR}, 2, 1),
        ({"missed": "skip"}, 1, 2),
        ({"missed": "skip", "grace": 3 * HOUR}, 3, 0),
    ],
    ids=str,
)
def test_of_three_due_occurrences_each_is_made_or_reported_as_missed(
    world: World, options: dict[str, Any], made: int, missed: int
) -> None:
    site = Site(world, **options)
    site.fire(START + 3 * HOUR)
    assert len(world.made) == made
    counts = [each.reason.split()[2] for each in world.events]
    assert counts == ([str(missed)] if missed else [])


def test_two_hundred_occurrences_are_kept_and_the_older_ones_go_now_and_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, pruned = Site(world, every=60.0), []
    prune = site.engine.store.prune

    def counted(name: str, keep: int) -> Any:
        pruned.append((site.view.schedule.made, keep))
        return prune(name, keep)

    monkeypatch.setattr(site.engine.store, "prune", counted, raising=False)
    for number in range(1, 104):
        view = site.fire(START + 60.0 * number)
        site.engine.send(view, view.open[0])
    assert pruned == [(50, 200), (100, 200)]


# -- overlaps --------------------------------------------------------------------------------------


def test_a_task_runs_until_its_end_is_recorded(world: World) -> None:
    site = Site(world)
    assert site.engine.runs("t"), "it may be in the queue"
    world.results.bury([RunRecord(RunKey("t"), "shop.work", "default", State.STARTED)])
    world.end("ended")
    assert site.engine.runs("t")
    assert not site.engine.runs("ended")
    assert not site.engine.runs("t", old=True), "it counts as lost, unless it waits in its code"


def test_the_oldest_that_waits_is_admitted_once_the_one_before_it_has_ended(world: World) -> None:
    site = Site(world, overlap="queue")
    world.ends = False
    first = site.fire(START + HOUR)
    for number in (2, 3):
        view = site.fire(START + number * HOUR)
    assert [each.state for each in view.open] == ["due", "waiting", "waiting"]
    assert site.engine.admit(view, "me") is view, "the first one has not ended"
    world.end(first.open[0].task_id)
    world.now += 5.0
    admitted = site.engine.admit(view, "you")
    assert admitted == site.view
    assert admitted is not None
    _, second, third = admitted.open
    assert (second.state, second.why, second.made_at, second.by) == ("due", "", world.now, "you")
    assert third.state == "waiting"
    head = admitted.schedule
    assert (head.last_id, head.last_at, head.by) == (second.task_id, world.now, "you")
    world.end(second.task_id)
    assert site.engine.admit(view, "me") is None, "that view is stale"
    assert site.engine.conflicts == 1


def test_skipped_occurrences_are_reported_and_waiting_ones_are_not(world: World) -> None:
    world.ends = False
    for overlap, reported in (("queue", 0), ("skip", 1)):
        site = Site(world, overlap=overlap)
        site.fire(world.now + HOUR)
        site.fire(world.now + HOUR)
        assert len(world.events) == reported
        site.schedules.delete("s")


# -- sending ---------------------------------------------------------------------------------------


def failing(site: Site, error: Exception) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    site.engine._sends.send_occurrence = fail  # type: ignore[method-assign]


def test_an_occurrence_that_cannot_be_sent_for_a_day_is_refused(world: World) -> None:
    site = Site(world)
    view = site.fire(START + HOUR)
    (made,) = view.open
    failing(site, QueueNotFound("queue default does not exist " + "x" * 400))
    world.now = made.made_at + 86399.5
    with pytest.raises(QueueNotFound):
        site.engine.send(view, made)
    assert site.view.open == (made,), "it is tried again"
    assert not world.events
    world.now = made.made_at + 86400.0
    refused = site.engine.send(view, made)
    assert refused.state == "refused"
    assert refused.why.startswith("queue default does not exist")
    assert len(refused.why) == 300
    assert site.view.open == ()
    assert site.engine.history("shop.s", 5) == [refused]
    (event,) = world.events
    assert event.reason == f"schedule shop.s: {refused.why}"


def test_an_error_that_another_try_does_not_mend_refuses_at_once(world: World) -> None:
    site = Site(world)
    view = site.fire(START + HOUR)
    failing(site, MessageTooLarge("it is too large"))
    refused = site.engine.send(view, view.open[0])
    assert (refused.state, refused.why) == ("refused", "it is too large")
    assert [each.event for each in world.events] == ["occurrence_skipped"]


def test_an_occurrence_that_was_sent_is_closed_and_says_so(world: World) -> None:
    site = Site(world)
    view = site.fire(START + HOUR)
    waited = replace(view.open[0], why="the task before it has not ended")
    sent = site.engine.send(view, waited)
    assert (sent.state, sent.why) == ("sent", "")
    assert site.engine.history("shop.s", 5) == [sent]
    (event,) = world.events
    assert (event.event, event.task_id, event.wait_seconds) == (
        "occurrence_sent", sent.task_id, 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("late", [0.0, 100.0, 1e6])
def test_jitter_and_delay_count_from_the_time_of_the_occurrence(world: World, late: float) -> None:
    site = Site(world, jitter=600.0, missed="all")
    definition = replace(site.engine.definition(site.view), delay=5.0)
    site.define(definition)
    view = site.fire(START + HOUR)
    (made,) = view.open
    jitter = jitter_of(made.task_id, 600.0)
    assert jitter > 100.0
    world.now = made.at + late
    site.engine.send(view, made)
    expected = 5.0 + max(0.0, jitter - late)
    assert world.delays[made.task_id] == pytest.approx(expected)


def test_one_that_is_made_before_its_time_is_not_delayed_for_longer(world: World) -> None:
    """The clocks of two workers differ a little."""
    site = Site(world, jitter=600.0)
    view = site.fire(START + HOUR)
    (made,) = view.open
    world.now = made.at - 3.0
    site.engine.send(view, made)
    assert world.delays[made.task_id] == pytest.approx(jitter_of(made.task_id, 600.0))


# -- definitions that change -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("away", "made"), [(HOUR, [1.5]), (86400.0, [24.5]), (86400.5, [])], ids=str
)
def test_a_definition_that_comes_back_within_a_day_goes_on_where_it_left(
    world: World, away: float, made: list[float]
) -> None:
    site = Site(world)
    first, other = site.definition(every=HOUR), site.definition(cron="59 23 31 12 *")
    world.now = START + HOUR / 2
    site.define(other)
    world.now += away
    back = site.define(first)
    started = START + HOUR / 2
    assert back.schedule.watermark == (started if made else world.now)
    assert site.engine.next_due(back) == (
        START + HOUR if made else START + HOUR * 25
    )  # fmt: skip


def test_one_that_is_paused_does_not_go_back(world: World) -> None:
    site = Site(world)
    first, other = site.definition(every=HOUR), site.definition(every=2 * HOUR)
    site.define(other)
    site.schedules.pause("s")
    world.now += 600.0
    assert site.define(first).schedule.watermark == world.now


def test_what_others_made_in_between_is_not_made_again(world: World) -> None:
    site = Site(world)
    first, other = site.definition(every=HOUR), site.definition(every=60.0)
    site.define(other)
    site.fire(START + 60.0)
    site.schedules.trigger("s")
    world.now = START + 90.0
    assert site.define(first).schedule.watermark == START + 60.0, "one sent by hand is none of them"


def test_what_is_due_by_the_old_definition_is_made_with_the_change(world: World) -> None:
    site = Site(world, missed="all")
    other = site.definition(every=2 * HOUR, missed="all")
    world.now = START + 2.5 * HOUR
    view = site.define(other, "you")
    assert [each.at for each in view.open] == [START + HOUR, START + 2 * HOUR]
    assert {each.by for each in view.open} == {"you"}
    assert view.schedule.watermark == world.now


def test_a_paused_schedule_makes_nothing_when_it_is_changed(world: World) -> None:
    site = Site(world, missed="all")
    site.schedules.pause("s")
    world.now = START + 2.5 * HOUR
    view = site.define(site.definition(every=2 * HOUR, missed="all"))
    assert (view.open, view.schedule.paused_at) == ((), START)


def test_as_many_as_one_transaction_takes_are_made_with_the_change(world: World) -> None:
    site = Site(world, every=60.0, missed="all", max_missed=1000)
    other = site.definition(every=HOUR)
    world.now = START + 90 * 60.0
    view = site.engine.define(other, 0, "me", site.view, of_code=False)
    assert view is not None
    assert len(view.open) == 90
    site.define(site.definition(every=60.0, missed="all", max_missed=1000))
    world.now += 91 * 60.0
    assert site.engine.define(other, 0, "me", site.view, of_code=False) is None
    assert len(site.view.open) == 180, "the first of them are made, and the caller comes again"


def test_the_ends_of_the_last_four_definitions_are_remembered(world: World) -> None:
    site = Site(world)
    definitions = [site.definition(every=HOUR + number) for number in range(7)]
    for definition in definitions:
        world.now += 10.0
        view = site.define(definition)
    left = view.schedule.left
    assert left == {
        definitions[number].digest: START + 10.0 * (number + 2) for number in (2, 3, 4, 5)
    }
    world.now += 10.0
    back = site.define(definitions[4]).schedule
    assert definitions[4].digest not in back.left, "it is the one in the head"


def test_with_only_occurrences_by_hand_the_newest_planned_one_is_not_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    for by_hand, watermark in ((2, START), (3, START + 90.0)):
        world.now = START
        site = Site(world)
        first, other = site.definition(every=HOUR), site.definition(every=2 * HOUR)
        site.define(other)
        for number in range(by_hand):
            world.now = START + 10.0 * (number + 1)
            site.schedules.trigger("s")
        world.now = START + 90.0
        assert site.define(first).schedule.watermark == watermark
        site.schedules.delete("s")


def test_a_damaged_definition_can_be_replaced(world: World) -> None:
    site = Site(world)
    site.engine.change("shop.s", lambda view: replace(view.schedule, template=b"damaged"))
    world.now = START + 2.5 * HOUR
    view = site.define(site.definition(every=HOUR))
    assert (view.open, view.schedule.watermark) == ((), world.now)
    assert site.engine.next_due(view) == START + 3 * HOUR


# -- claims, and what is verified ------------------------------------------------------------------


def test_a_new_claim_deletes_those_that_ended_an_hour_ago(world: World) -> None:
    site = Site(world)
    claim = site.engine.claim
    now = world.now
    assert claim("shop.s", Claim("a" * 50, 0, 1.0, now - 3600.0))
    assert claim("shop.s", Claim("b" * 50, 0, 1.0, now - 3600.5))
    assert claim("shop.s", Claim("c" * 50, 0, 1.0, now))
    assert {each.digest[0] for each in site.view.claims} == {"a", "c"}
    kept = next(each for each in site.view.claims if each.digest[0] == "c")
    world.now += 7200.0
    assert claim("shop.s", replace(kept, seen_at=world.now)), "a renewal deletes nothing"
    assert {each.digest[0] for each in site.view.claims} == {"a", "c"}
    assert not claim("shop.s", kept), "another process has renewed it"
    rows = {read_claim(each.row) for each in site.view.claims}
    assert None not in rows


class Counting(Codec):
    """A codec that counts what it verifies."""

    verified = 0

    def from_envelope(self, *args: Any, **options: Any) -> Any:
        self.verified += 1
        return super().from_envelope(*args, **options)


def test_a_definition_is_verified_once_and_the_oldest_of_many_are_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEFINITIONS", 2)
    codec = Counting()
    schedules = world.schedules(codec=codec)
    engine, views = schedules.engine, []
    for name in ("a", "b", "c"):
        schedules.create(name, call(1), every=HOUR)
        view = schedules.view(name)
        assert view is not None
        views.append(view)
    codec.verified = 0
    for _ in range(2):
        for view in views[:2]:
            assert engine.definition(view).name == view.name
    assert codec.verified == 2
    engine.definition(views[2])
    engine.definition(views[1])
    engine.definition(views[2])
    assert codec.verified == 3
    engine.definition(views[0])
    assert codec.verified == 4
