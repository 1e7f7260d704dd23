"""Housekeeping of open workflows, with a clock that the test moves."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aztask import App, chain, chord, group
from aztask.errors import QueueNotFound
from aztask.message.encryption import Locked
from aztask.settlement import Complete, Resubmit
from aztask.stores.records.base import (
    PARKED,
    Finish,
    Outcome,
    RunKey,
    RunRecord,
    Start,
    State,
)
from aztask.stores.records.onceruns import OnceRun, once_runs_of
from aztask.stores.records.workflows import ROOT, Addition, DocumentChange
from aztask.support.clock import Clock
from aztask.workflows import mailing
from aztask.workflows.edits import RowEdit, row_name
from aztask.workflows.joins import TaskEnd
from aztask.workflows.packing import pack_late
from aztask.workflows.place import NodePlace
from aztask.workflows.repair import (
    EMPTY_SECONDS,
    LOST_SECONDS,
    ROOTLESS_SECONDS,
    SWEEP_SECONDS,
    Repair,
)
from aztask.workflows.starting import LEASE_SECONDS, WorkflowLauncher


class Shop:
    """An app in memory, and a housekeeper with a clock of its own."""

    def __init__(self, app):
        self.app, self.engine = app, app.workflows.engine
        self.work = app.task(name="shop.work")(lambda x=0: x)
        self.once = app.task(name="shop.once", delivery="at-most-once")(lambda x=0: x)
        self.at = 0.0
        self.wall = None
        self.repair = self.housekeeper(app.broker)

    def housekeeper(self, broker):
        clock = Clock(monotonic=lambda: self.at, wall=self.now)
        return Repair(
            self.engine,
            WorkflowLauncher(self.engine, self.app.broker, self.app.codec, clock),
            broker,
            clock,
            self.app.tasks,
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
        place = NodePlace.of(plan, plan.nodes[number])
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
    store.write([DocumentChange("w", "plan-x", b"plan")])
    shop.wall = 1000.0
    shop.look()
    shop.look(SWEEP_SECONDS - 1)
    assert store.read([("w", "plan-x")]) != [None]
    shop.look(2.0)
    assert store.read([("w", "plan-x")]) == [None]
    assert store.open_workflows(5) == []


def test_parts_of_a_sender_whose_clock_is_behind_are_not_swept_while_it_sends(shop):
    store = shop.engine.store
    store.announce("w", 1000.0)
    store.write([DocumentChange("w", "plan-x", b"plan")])
    shop.wall = 1000.0 + 86400.0
    shop.look()
    shop.look(ROOTLESS_SECONDS - 1)
    assert store.read([("w", "plan-x")]) != [None]
    shop.look(2.0)
    assert store.read([("w", "plan-x")]) == [None]


def test_a_start_whose_sender_died_is_finished_once_its_lease_has_lapsed(shop):
    chord([shop.work.s(n) for n in range(3)], shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    (document,) = shop.engine.store.read([("w", ROOT)])
    root = shop.engine.graphs.root("w")
    dead = replace(root, starting_until=root.at + LEASE_SECONDS)
    shop.engine.store.write([DocumentChange("w", ROOT, dead.pack(), document.tag)])
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
    end = TaskEnd("w", NodePlace.of(plan, plan.nodes[4]), 0, State.SUCCEEDED, b"\x05").end()
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


def test_a_task_that_waits_is_not_lost_before_its_time(shop):
    """Its message is hidden: no service shows all that is due in three days."""
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    key, due = RunKey("w.1"), shop.now() + 3 * 86400.0
    results = shop.app.results
    results.start([Start(key, "shop.work", "default", 1, "one", "worker", shop.now())])
    parked = Outcome(
        State.SNOOZED, Resubmit(9.0, due, counted=False), error_type=PARKED, at=shop.now()
    )
    results.record([Finish(key, "one", parked)])
    for _ in range(3):
        assert shop.look(86400.0 - 2.0) == "started"
    shop.look(2 * EMPTY_SECONDS)
    assert shop.look(EMPTY_SECONDS + 1.0) == "failed", "nothing woke it"


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
    shop.engine.store.write([DocumentChange("a", ROOT, b"\x00", document.tag)])
    shop.record(2)
    shop.record(3)
    shop.look()
    shop.look(1.0)
    assert "workflow a cannot be checked" in caplog.text
    assert shop.waiting() == 5


def test_a_workflow_whose_key_is_missing_stops_no_other(shop, monkeypatch, caplog):
    """It is what the store says of a document that is encrypted with a key of another program."""
    for name in ("a", "w"):
        chord([shop.work.s(n) for n in range(2)], shop.work.s()).delay(workflow_id=name)
    root = shop.engine.graphs.root

    def locked(workflow):
        if workflow == "a":
            raise Locked("document root of workflow a waits")
        return root(workflow)

    monkeypatch.setattr(shop.engine.graphs, "root", locked)
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


def test_what_comes_behind_a_task_that_still_runs_is_not_lost(shop):
    """However long it runs, and although the queue is empty."""
    chain(shop.work.s(1), group(shop.work.s(), shop.work.s())).delay(workflow_id="w")
    shop.app.broker.purge("default")
    key = RunKey("w.1")
    shop.app.results.start([Start(key, "shop.work", "default", 1, "one", "worker", 1000.0)])
    plan = shop.engine.graphs.plan("w")
    behind = [f"w.{node.number}" for node in plan.nodes if node.task and node.number != 1]
    for _ in range(6):
        shop.look(EMPTY_SECONDS / 2)
        assert [shop.app.results.get(each) for each in behind] == [None, None]


def test_a_sender_that_is_slow_keeps_its_lease(shop, monkeypatch):
    monkeypatch.setattr(mailing, "BATCH", 1)
    group(shop.work.s(n) for n in range(6)).delay(workflow_id="w")
    (document,) = shop.engine.store.read([("w", ROOT)])
    root = shop.engine.graphs.root("w")
    dead = replace(root, starting_until=root.at + LEASE_SECONDS)
    shop.engine.store.write([DocumentChange("w", ROOT, dead.pack(), document.tag)])
    send, until = shop.app.broker.send, []

    def slow(queue, envelopes):
        shop.at += LEASE_SECONDS / 2
        until.append(shop.engine.graphs.root("w").starting_until - shop.now())
        send(queue, envelopes)

    monkeypatch.setattr(shop.app.broker, "send", slow)
    shop.at = 2 * LEASE_SECONDS
    shop.look()
    assert len(until) == 6
    assert min(until) > -LEASE_SECONDS / 2, "no other process takes over for long"
    assert shop.engine.graphs.root("w").starting_until is None


# -- times, each at its end ------------------------------------------------------------------------


def test_parts_are_kept_for_exactly_ten_minutes(shop):
    store = shop.engine.store
    store.announce("w", 1000.0)
    store.write([DocumentChange("w", "plan-x", b"plan")])
    shop.wall = 1000.0
    shop.look()
    shop.look(600.0)
    assert store.read([("w", "plan-x")]) != [None]
    shop.look(0.5)
    assert store.read([("w", "plan-x")]) == [None]


def starting(shop, until):
    """The workflow as a sender leaves it that died before it sent anything."""
    chord([shop.work.s(n) for n in range(3)], shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    (document,) = shop.engine.store.read([("w", ROOT)])
    root = shop.engine.graphs.root("w")
    dead = replace(root, starting_until=root.at + until)
    assert shop.engine.store.write([DocumentChange("w", ROOT, dead.pack(), document.tag)]) != [None]


def test_a_sender_may_be_silent_for_exactly_its_lease(shop):
    starting(shop, 30.0)
    shop.look(30.0)
    assert shop.waiting() == 0
    shop.look(0.5)
    assert shop.waiting() == 3


def test_of_two_workers_one_takes_over_and_has_thirty_seconds(shop, monkeypatch):
    starting(shop, 30.0)
    change, leases = shop.engine.documents.change, []

    def faster(edits):
        if not leases:  # another worker takes the lease first
            (document,) = shop.engine.store.read([("w", ROOT)])
            now = shop.engine.graphs.root("w")
            taken = replace(now, starting_until=shop.now() + 30.5)
            leases.append(taken.starting_until)
            shop.engine.store.write([DocumentChange("w", ROOT, taken.pack(), document.tag)])
        change(edits)

    monkeypatch.setattr(shop.engine.documents, "change", faster)
    shop.look(31.0)
    assert shop.waiting() == 0
    assert shop.engine.graphs.root("w").starting_until == leases[0]
    shop.look(31.0)
    assert shop.waiting() == 3
    assert shop.engine.graphs.root("w").starting_until is None


def test_the_worker_that_takes_over_holds_the_lease_while_it_sends(shop, monkeypatch):
    starting(shop, 30.0)
    seen = []
    send = shop.app.broker.send

    def look(queue, envelopes):
        seen.append(shop.engine.graphs.root("w").starting_until - shop.now())
        send(queue, envelopes)

    monkeypatch.setattr(shop.app.broker, "send", look)
    shop.look(40.0)
    assert seen == [30.0]


@pytest.mark.parametrize(("empty", "seconds"), [(True, 60.0), (False, 86400.0)])
def test_a_lost_task_fails_at_its_very_time(shop, empty, seconds):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    if empty:
        shop.app.broker.purge("default")
    shop.look()
    shop.look()
    assert shop.look(seconds - 0.5) == "started"
    assert shop.look(0.5) == "failed"


def test_a_queue_that_becomes_empty_begins_the_minute_anew(shop):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.look()
    shop.look()
    shop.look(3600.0)
    shop.app.broker.purge("default")
    assert shop.look(1.0) == "started"
    assert shop.look(59.5) == "started"
    assert shop.look(0.5) == "failed"


def test_progress_begins_the_minute_anew(shop):
    chord([shop.work.s(1), shop.work.s(2)], shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    shop.look(59.0)
    shop.end(2)
    shop.look()
    shop.look(30.0)
    assert shop.app.results.get("w.3") is None
    shop.look(60.0)
    assert shop.app.results.get("w.3").state is State.FAILED


@pytest.mark.parametrize(
    "counts",
    [
        {"active": 1},
        {"leased": 1},
        {"scheduled": 1},
        {"deferred": 1},
        {"total": 1},
        {"active": None},
    ],
    ids=str,
)
def test_a_queue_is_empty_only_if_it_certainly_holds_nothing(shop, counts):
    nothing = {"active": 0, "leased": 0, "scheduled": 0, "deferred": 0, "total": 0}
    chain(shop.work.s(1)).delay(workflow_id="w")
    usual = shop.app.broker.stats("default")
    given = dict.fromkeys(nothing) if None in counts.values() else {**nothing, **counts}
    shop.repair = shop.housekeeper(SimpleNamespace(stats=lambda queue: replace(usual, **given)))
    shop.look()
    shop.look()
    assert shop.look(3600.0) == "started"
    some = {"active": 0, "leased": None, "scheduled": None, "deferred": None, "total": None}
    shop.repair = shop.housekeeper(SimpleNamespace(stats=lambda queue: replace(usual, **some)))
    shop.look()
    shop.look()
    assert shop.look(60.0) == "failed", "a service that counts only some of them"


def test_a_queue_that_cannot_be_counted_is_not_empty(shop):
    def fail(queue):
        raise QueueNotFound("no such queue")

    shop.repair = shop.housekeeper(SimpleNamespace(stats=fail))
    chain(shop.work.s(1)).delay(workflow_id="w")
    shop.look()
    shop.look()
    assert shop.look(3600.0) == "started"
    assert shop.look(86400.0) == "failed"


# -- lost tasks ------------------------------------------------------------------------------------


def test_a_lost_task_says_which_queue_it_was_in(shop):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    shop.look(60.0)
    record = shop.app.results.get("w.1")
    assert (record.task, record.queue, record.key.generation) == ("shop.work", "default", 0)
    assert (record.outcome.error_type, record.outcome.settlement.reason) == (
        "member-lost", "member-lost",
    )  # fmt: skip
    assert "no longer in queue default" in record.outcome.error
    assert record.outcome.at == shop.now()


def test_a_task_that_was_lost_while_it_waited_for_its_retry_fails_at_that_run(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    key, results = RunKey("w.1"), shop.app.results
    results.start([Start(key, "shop.work", "default", 1, "one", "worker", 1000.0)])
    retried = Outcome(State.RETRYING, Resubmit(5.0, 1006.0), None, "OSError", "disk", at=1001.0)
    results.record([Finish(key, "one", retried)])
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    assert shop.look(60.0) == "failed"
    record = results.get("w.1")
    assert (record.key.hop, record.state) == (1, State.FAILED)


def test_one_that_ends_right_before_it_counts_as_lost_keeps_its_end(shop, monkeypatch):
    chain(shop.work.s(1)).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    bury, ended = shop.app.results.bury, []

    def too_late(records, read):
        if not ended:
            ended.append(shop.record(1))
        return bury(records, read)

    monkeypatch.setattr(shop.app.results, "bury", too_late)
    assert shop.look(60.0) == "started"
    assert shop.look() == "succeeded"


def test_only_what_follows_an_at_most_once_task_is_sent_again_and_once(shop):
    chain(shop.once.s(1), shop.work.s(), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.record(1)
    for seconds in (0.0, 0.0, 59.5):
        shop.look(seconds)
        assert shop.waiting() == 0
    shop.look(0.5)
    assert shop.waiting() == 1
    shop.app.broker.purge("default")
    shop.look()
    assert shop.look(59.5) == "started"
    assert shop.look(1.0) == "failed", "it was sent again, and is lost again"
    assert shop.waiting() == 0


def test_what_follows_another_task_is_sent_by_its_redelivery(shop):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.record(1)
    shop.look()
    shop.look()
    assert shop.look(60.0) == "failed"
    assert shop.waiting() == 0
    (failure,) = shop.app.workflows.result("w").failures
    assert failure.node == 2


def test_a_task_that_runs_without_its_message_is_not_lost(shop):
    """Its worker noted that it removed the message; whether that one lives, others find out."""
    chain(shop.once.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    key, notes = RunKey("w.1"), once_runs_of(shop.app.results)
    shop.app.results.start([Start(key, "shop.once", "default", 1, "one", "pod", 1000.0)])
    run = OnceRun(key, "shop.once", "default", "pod", "1f", 1000.0, 60.0)
    notes.note([run])
    for _ in range(100):
        assert shop.look(60.0) == "started"
    notes.drop([run])
    shop.look()
    shop.look()
    assert shop.look(60.0) == "failed"


def test_a_task_that_starts_before_it_counts_as_lost_goes_on(shop, monkeypatch):
    chain(shop.work.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    results, start = (
        shop.app.results,
        Start(RunKey("w.1"), "shop.work", "default", 1, "a", "w", 1.0),
    )
    bury = results.bury

    def late(*given):
        results.start([start])
        return bury(*given)

    monkeypatch.setattr(results, "bury", late)
    assert shop.look(60.0) == "started"
    assert results.get("w.1").state is State.STARTED


def test_the_first_task_of_an_at_most_once_chain_is_lost_like_any_other(shop):
    chain(shop.once.s(1), shop.work.s()).delay(workflow_id="w")
    shop.app.broker.purge("default")
    shop.look()
    shop.look()
    assert shop.look(60.0) == "failed"
    assert shop.waiting() == 0


# -- what was decided, and not followed ------------------------------------------------------------


def decide_only(shop, join, *ends):
    """Set bits and the decision of a join, as a process does that dies right behind that."""
    plan = shop.engine.graphs.plan("w")
    node = plan.nodes[join]
    made = [
        TaskEnd(
            "w", NodePlace.of(plan, plan.nodes[number]), 0, state, b"\x05", "OSError", "disk"
        ).end()
        for number, state in ends
    ]
    edit = RowEdit("w", join, 0, node.layout, made, shop.now(), node.passes_errors)
    shop.engine.documents.change([edit])
    assert edit.row.decision is not None


def test_a_workflow_whose_root_was_decided_is_ended(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    decide_only(shop, 0, (1, State.SUCCEEDED))
    assert shop.look() == "started"
    assert shop.look() == "succeeded"
    assert shop.engine.store.open_workflows(5) == []


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_a_group_that_was_decided_sets_its_bit_above(shop, state):
    group(shop.work.s(1), shop.work.s(2)).delay(workflow_id="w")
    decide_only(shop, 1, (2, state), (3, State.SUCCEEDED))
    shop.look()
    assert shop.look() == state.value


def test_a_failed_group_with_a_body_fails_what_is_above_it(shop):
    chord([shop.work.s(1), shop.work.s(2)], shop.work.s()).delay(workflow_id="w")
    decide_only(shop, 1, (2, State.FAILED), (3, State.SUCCEEDED))
    shop.look()
    assert shop.look() == "failed"
    assert shop.waiting() == 2, "no body"


def test_a_group_that_succeeded_waits_for_its_body(shop):
    chord([shop.work.s(1), shop.work.s(2)], shop.work.s()).delay(workflow_id="w")
    for number in (2, 3):
        shop.end(number)
    for _ in range(3):
        assert shop.look(1.0) == "started"
    assert shop.waiting() == 3


def test_rows_of_a_large_group_are_noted_again(shop, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([shop.work.s(n) for n in range(4)], shop.work.s()).delay(workflow_id="w")
    plan = shop.engine.graphs.plan("w")
    node = plan.nodes[1]
    assert node.rows == 2
    for number in (0, 1):  # both rows are full, and the join does not know it
        ends = [
            TaskEnd(
                "w", NodePlace.of(plan, plan.nodes[2 + member]), 0, State.SUCCEEDED, b"\x05"
            ).end()
            for member in node.layout.members(number)
        ]
        shop.engine.documents.change([RowEdit("w", 1, number, node.layout, ends, 5.0, False)])
    shop.look()
    assert shop.waiting() == 4
    shop.look()
    assert shop.waiting() == 5, "the body is sent"
    for _ in range(2):
        shop.look(1.0)
    assert shop.waiting() == 5, "once"
    shop.record(6)
    shop.look(1.0)
    assert shop.look(1.0) == "succeeded"


def test_a_row_that_is_not_full_decides_nothing(shop, monkeypatch):
    monkeypatch.setattr("aztask.workflows.plan.BLOCK", 2)
    chord([shop.work.s(n) for n in range(4)], shop.work.s()).delay(workflow_id="w")
    for number in (2, 3, 4):
        shop.end(number)
    for _ in range(3):
        shop.look(1.0)
    assert shop.waiting() == 4


def test_a_step_of_a_chain_that_ended_without_a_bit_fills_its_slot(shop):
    chain(shop.work.s(1), shop.work.s(), shop.work.s()).delay(workflow_id="w")
    shop.end(1)
    shop.record(2, State.FAILED)
    shop.look()
    assert shop.look(1.0) == "failed"
    (failure,) = shop.app.workflows.result("w").failures
    assert failure.node == 2


def test_an_end_without_an_outcome_is_a_failure_that_says_what_is_damaged(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    broken = RunRecord(RunKey("w.1"), "shop.work", "default", State.UNREADABLE, damage="its bits")
    shop.app.results.get = lambda task_id: broken if task_id == "w.1" else None
    shop.look()
    assert shop.look(1.0) == "failed"
    (failure,) = shop.app.workflows.result("w").failures
    assert (failure.state, failure.error_type, failure.error) == (
        State.FAILED, "unreadable", "its bits",
    )  # fmt: skip


# -- pages -----------------------------------------------------------------------------------------


def test_each_look_is_at_one_page_and_the_next_goes_on_behind_it(shop, monkeypatch):
    monkeypatch.setattr("aztask.workflows.repair.PAGE", 2)
    for number in range(5):
        chain(shop.work.s(number)).delay(workflow_id=f"w{number}")
    looked = []
    one = shop.engine.graphs.root
    monkeypatch.setattr(
        shop.engine.graphs, "root", lambda name: (looked.append(name), one(name))[1]
    )
    counts = [shop.repair.look() for _ in range(4)]
    assert counts == [2, 2, 1, 2]
    looked = [name for name in looked if name != "w"]  # the clock of these tests asks for it
    assert looked == ["w0", "w1", "w2", "w3", "w4", "w0", "w1"]


def test_the_tasks_of_a_large_workflow_are_compared_in_turns(shop, monkeypatch):
    monkeypatch.setattr("aztask.workflows.repair.CHECKED", 2)
    group(*(shop.work.s(n) for n in range(5))).delay(workflow_id="w")
    asked = []
    get = shop.app.results.get
    monkeypatch.setattr(
        shop.app.results, "get", lambda task_id: (asked.append(task_id), get(task_id))[1]
    )
    shop.look()
    for expected in (["w.2"], ["w.3", "w.4"], ["w.5", "w.6"], ["w.2"]):
        asked.clear()
        shop.look()
        assert asked == expected, "the slot of the group itself is one of them"


def test_a_workflow_that_ended_is_closed_and_forgotten(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    shop.look()
    root = shop.engine.graphs.root("w")
    (document,) = shop.engine.store.read([("w", ROOT)])
    ended = replace(root, ended_at=root.at + 1.0, state=State.SUCCEEDED)
    shop.engine.store.write([DocumentChange("w", ROOT, ended.pack(), document.tag)])
    assert [each.workflow for each in shop.engine.store.open_workflows(5)] == ["w"]
    shop.look()
    assert shop.engine.store.open_workflows(5) == []
    (listed,) = shop.engine.store.ended_workflows(5)
    assert listed.ended_at == root.at + 1.0


def test_of_a_workflow_that_was_purged_this_process_remembers_nothing(shop):
    chain(shop.work.s(1)).delay(workflow_id="w")
    shop.end(1)
    graphs = shop.engine.graphs
    ended_at = graphs.recent_root("w").ended_at
    shop.repair.purge(ended_at)
    assert graphs.recent_root("w") is not None, "it ended at that time, not before"
    shop.repair.purge(ended_at + 0.5)
    assert graphs.recent_root("w") is None


def test_the_ends_that_housekeeping_notes_are_repeated_ones(shop, monkeypatch):
    """Another process may have begun to set them, so they are never appended."""
    chord([shop.work.s(1), shop.work.s(2)], shop.work.s()).delay(workflow_id="w")
    shop.record(2)
    noted = []
    ended = shop.engine.joins.ended
    monkeypatch.setattr(shop.engine.joins, "ended", lambda ends: (noted.extend(ends), ended(ends)))
    shop.look()
    shop.look()
    (end,) = noted
    assert (end.place.node, end.repeated, end.value, end.error_type, end.error) == (
        2, True, b"\x05", "", "",
    )  # fmt: skip
