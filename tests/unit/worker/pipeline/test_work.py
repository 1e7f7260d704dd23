"""One delivery's life: every change of stage is a row of the table, and parts that are frozen."""

from __future__ import annotations

from typing import Any

import pytest

from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.settlement import Abandon, Complete, DeadLetter, Lapse
from aztask.stores.records.base import Outcome, RunKey, State
from aztask.worker.pipeline.work import (
    TRANSITIONS,
    Decided,
    Pointer,
    Run,
    Stage,
    Step,
    Stop,
    WorkItem,
    message_of,
)

GOES = {
    "received": {"claim": "ready", "decide": "decided", "end": "ended"},
    "ready": {"send": "running", "decide": "decided", "end": "ended"},
    "running": {"take back": "ready", "decide": "decided", "end": "ended"},
    "decided": {"decide": "decided", "hold": "held", "end": "ended"},
    "held": {"due": "decided", "decide": "decided", "end": "ended"},
    "ended": {"end": "ended"},
}


@pytest.fixture
def item() -> WorkItem:
    delivery = Delivery("q", Envelope(b""), 7, "t", 1, 0.0, 100.0, 60.0)
    receiver: Any = object()
    made = WorkItem(1, delivery, receiver, Lease.of(delivery), "q", 0.0, "w/1")
    made.open(TaskMessage("a", "shop.count", "q", b"body"), None)
    return made


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("step", Step)
def test_every_step_from_every_stage(item: WorkItem, stage: Stage, step: Step) -> None:
    item.stage = stage
    after = GOES[stage.value].get(step.value)
    if after is None:
        with pytest.raises(RuntimeError, match=f"{stage.value} cannot {step.value}"):
            item.change(step)
        assert item.stage is stage
    else:
        item.change(step)
        assert item.stage.value == after
    assert len(TRANSITIONS) == sum(map(len, GOES.values()))


def test_a_life_from_receipt_to_settlement(item: WorkItem) -> None:
    item.claim(2)
    item.change(Step.CLAIM)
    assert item.claimed is not None
    assert (item.claimed.starts, item.run, item.duration, item.stop) == (2, None, 0.0, None)
    item.sent()
    assert item.run == Run(
        None, 0.0, start_reported=False, soft_limit_signalled=False, cancelled=False, stop=None
    )
    item.taken_back()
    assert (item.stage, item.run) == (Stage.READY, None)
    item.sent()
    item.run.duration, item.run.stop = 2.5, Stop("why", 5.0)
    assert (item.duration, item.stop) == (2.5, Stop("why", 5.0))
    outcome = Outcome(State.SUCCEEDED, Complete())
    item.decide(outcome.settlement, outcome)
    assert item.decided == Decided(Complete(), outcome)
    item.recorded()
    assert item.decided == Decided(Complete(), outcome, recorded=True)
    item.end()
    item.end()
    assert item.stage is Stage.ENDED


def test_what_waits_is_abandoned_when_it_is_due(item: WorkItem) -> None:
    item.decide(DeadLetter("why"), None, refused=True)
    item.hold(50.0)
    assert (item.stage, item.held_until) == (Stage.HELD, 50.0)
    item.rest()
    assert item.decided == Decided(Abandon())
    item.due()
    assert (item.stage, item.settlement) == (Stage.DECIDED, Abandon())


def test_nothing_is_recorded_of_what_is_not_decided(item: WorkItem) -> None:
    item.recorded()
    assert (item.decided, item.outcome) == (None, None)
    assert item.settlement == Complete(), "at most once it is completed before it runs"


def test_of_each_kind_the_first_note_is_kept(item: WorkItem) -> None:
    item.note("lease_lost", "first")
    item.note("settle_failed", "other")
    item.note("lease_lost", "second")
    assert item.notes == [("lease_lost", "first"), ("settle_failed", "other")]


def test_a_message_is_rewritten_for_this_delivery_alone(item: WorkItem) -> None:
    before = message_of(item)
    item.rewrite(saved=b"page 7", resubmit_count=2)
    assert (message_of(item).saved, message_of(item).resubmit_count) == (b"page 7", 2)
    assert before.saved is None
    assert item.key == RunKey("a", 0, 0)
    assert len(item.message_fields()) > 10
    item.opened = None
    item.rewrite(saved=b"")
    assert (item.opened, item.task) == (None, None)
    with pytest.raises(RuntimeError, match="could not be read"):
        message_of(item)


def test_the_leases_that_are_held_for_it(item: WorkItem) -> None:
    assert item.leases == [item.lease]
    other = Lease.of(Delivery("q", Envelope(b""), 8, "t", 1, 0.0, 100.0, 60.0))
    item.pointer = Pointer(other.delivery, other)
    assert item.leases == [item.lease, other]
    item.settled = True
    assert item.leases == [item.lease, other]
    item.pointer = None
    assert item.leases == []


@pytest.mark.parametrize(
    ("session", "ordered", "in_order"),
    [(None, True, False), ("slot", True, True), ("slot", False, False), ("slot", None, True)],
)
def test_what_must_keep_its_place(
    item: WorkItem, session: Any, ordered: bool | None, in_order: bool
) -> None:
    item.session = session
    if ordered is None:
        item.opened = None
    else:
        item.rewrite(ordered=ordered)
    assert item.in_order is in_order


def test_what_is_left_to_lapse(item: WorkItem) -> None:
    assert item.left_to_lapse is False
    item.decide(Abandon())
    assert item.left_to_lapse is False
    item.decide(Lapse())
    assert item.left_to_lapse is True
