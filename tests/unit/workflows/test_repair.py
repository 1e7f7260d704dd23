"""Housekeeping of open workflows, with a clock that the test moves."""

from contextlib import closing
from dataclasses import replace

import pytest

from aztask import App, chain, chord
from aztask.canvas.place import Place
from aztask.results.base import Finish, Outcome, RunKey, Start, State
from aztask.results.workflows import ROOT, Addition, Change
from aztask.settlement import Complete
from aztask.support.clock import Clock
from aztask.workflows.edits import row_name
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import pack_late
from aztask.workflows.repair import EMPTY_SECONDS, LOST_SECONDS, SWEEP_SECONDS, Repair
from aztask.workflows.starting import LEASE_SECONDS, Starter


class Shop:
    """An app in memory, and a housekeeper with a clock of its own."""

    def __init__(self, app):
        self.app, self.engine = app, app.workflows.engine
        self.work = app.task(name="shop.work")(lambda x=0: x)
        self.once = app.task(name="shop.once", delivery="at-most-once")(lambda x=0: x)
        self.at = 0.0
        self.wall = None
        clock = Clock(monotonic=lambda: self.at, wall=self.now)
        self.repair = Repair(
            self.engine,
            Starter(self.engine, app.broker, app.codec, clock),
            app.broker.stats,
            clock,
            at_most_once=lambda name: name == "shop.once",
        )

    def now(self):
        base = self.engine.graphs.root("w")
        return (base.at if base is not None else self.wall or 0.0) + self.at

    def look(self, after=0.0):
        self.at += after
        self.repair.look()
        return self.app.workflows.result("w").state

    def record(self, number, state=State.SUCCEEDED, value=b"\x05"):
        key = RunKey(f"w.{number}")
        results = self.app.results
        results.start([Start(key, "shop.work", "default", number, "one", "worker", 1000.0)])
        results.record([Finish(key, "one", Outcome(state, Complete(), value, at=2000.0))])

    def end(self, number, state=State.SUCCEEDED):
        self.record(number, state)
        plan = self.engine.graphs.plan("w")
        place = Place.of(plan, plan.nodes[number])
        self.engine.joins.ended([TaskEnd("w", place, 0, state, b"\x05")])

    def waiting(self):
        return self.app.broker.stats("default").active


@pytest.fixture
def shop():
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as app:
        yield Shop(app)


def test_parts_without_a_root_are_swept_when_they_are_old(shop):
    store = shop.engine.store
    store.announce("w", 1000.0)
    store.write([Change("w", "plan-x", b"plan")])
    shop.wall = 1000.0
    shop.look(SWEEP_SECONDS - 1)
    assert store.read([("w", "plan-x")]) != [None]
    shop.look(2.0)
    assert store.read([("w", "plan-x")]) == [None]
    assert store.open_workflows(5) == []


def test_a_start_whose_sender_died_is_finished_once_its_lease_has_lapsed(shop):
    chord([shop.work.s(n) for n in range(3)], shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    (document,) = shop.engine.store.read([("w", ROOT)])
    root = shop.engine.graphs.root("w")
    dead = replace(root, starting_until=root.at + LEASE_SECONDS)
    shop.engine.store.write([Change("w", ROOT, dead.pack(), document.tag)])
    shop.look(LEASE_SECONDS - 1)
    assert shop.waiting() == 0
    shop.look(2.0)
    assert shop.waiting() == 3
    assert shop.engine.graphs.root("w").starting_until is None
    shop.look(1.0)
    assert shop.waiting() == 3


def test_ends_that_were_recorded_but_not_counted_are_counted(shop):
    chord([shop.work.s(n) for n in range(3)], shop.work.s()).delay(workflow_id="w")
    for number in (2, 3):
        shop.end(number)
    shop.record(4)
    shop.look()
    assert shop.waiting() == 3
    shop.look(1.0)
    assert shop.waiting() == 4, "the body is sent"
    shop.look(1.0)
    assert shop.waiting() == 4, "once"
    shop.record(5)
    for _ in range(3):
        state = shop.look(1.0)
    assert state == "succeeded"
    assert shop.engine.store.open_workflows(5) == []


def test_a_row_whose_last_bit_was_appended_is_decided(shop):
    """Its worker died before it decided, and an at-most-once task has no redelivery."""
    chord([shop.once.s(n) for n in range(3)], shop.work.s()).delay(workflow_id="w")
    for number in (2, 3):
        shop.end(number)
    shop.record(4)
    plan = shop.engine.graphs.plan("w")
    end = TaskEnd("w", Place.of(plan, plan.nodes[4]), 0, State.SUCCEEDED, b"\x05").end()
    piece = pack_late(2, end)
    shop.engine.store.append([Addition("w", row_name(1, 0), {"p": piece})])
    shop.look()
    shop.look(1.0)
    assert shop.waiting() == 4, "the body is sent"
    shop.look(1.0)
    assert shop.waiting() == 4, "once"
    shop.record(5)
    for _ in range(3):
        state = shop.look(1.0)
    assert state == "succeeded"


def test_what_follows_an_at_most_once_task_is_sent_by_housekeeping(shop):
    """Its message is gone before it runs, so no redelivery does that."""
    chain(shop.once.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.record(1)
    shop.look()
    shop.look(1.0)
    shop.look(EMPTY_SECONDS)
    assert shop.waiting() == 1


def test_a_task_whose_message_is_gone_fails_a_minute_after_its_queue_is_empty(shop):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look(1.0)
    assert shop.look(EMPTY_SECONDS - 1) == "started"
    assert shop.look(2.0) == "failed"
    (failure,) = shop.app.workflows.result("w").failures
    assert (failure.node, failure.error_type) == (1, "member-lost")
    assert shop.app.results.get("w.1").state is State.FAILED
    late = Start(RunKey("w.1"), "shop.work", "default", 9, "two", "worker", 3000.0)
    (answer,) = shop.app.results.start([late])
    assert answer.outcome.settlement.reason == "member-lost", "a late message does not run"


def test_in_a_queue_that_is_never_empty_it_fails_after_a_day(shop):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.look()
    shop.look(1.0)
    assert shop.look(LOST_SECONDS - 10) == "started"
    assert shop.look(11.0) == "failed"


def test_a_workflow_that_cannot_be_read_stops_no_other(shop, caplog):
    for name in ("a", "w"):
        chord([shop.work.s(n) for n in range(2)], shop.work.s()).delay(workflow_id=name)
    (document,) = shop.engine.store.read([("a", ROOT)])
    shop.engine.store.write([Change("a", ROOT, b"\x00", document.tag)])
    shop.record(2)
    shop.record(3)
    shop.look()
    shop.look(1.0)
    assert "workflow a cannot be checked" in caplog.text
    assert shop.waiting() == 5


def test_ended_workflows_are_deleted_after_their_retention(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    shop.end(1)
    ended_at = shop.engine.graphs.root("w").ended_at
    shop.repair.purge(ended_at - 1)
    assert shop.app.workflows.result("w").state == "succeeded"
    shop.repair.purge(ended_at + 1)
    assert shop.app.workflows.result("w").state == "pending"
