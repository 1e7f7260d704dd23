"""The finish lanes: a workflow's tasks never delay the settlement of any other task."""

import threading
from types import SimpleNamespace

import pytest

from aztask.worker.finishing import FinishLanes
from aztask.worker.lane import Lane
from aztask.worker.mailbox import Mailbox


@pytest.fixture
def mailbox():
    made = Mailbox()
    yield made
    made.close()


def item(name, *, workflow=False):
    return SimpleNamespace(name=name, place=object() if workflow else None)


def test_a_workflow_that_waits_for_its_row_delays_no_other_task(mailbox):
    blocked, settled = threading.Event(), threading.Event()

    def finish(items):
        if any(each.place is not None for each in items):
            blocked.wait(20)
        else:
            settled.set()

    lanes = FinishLanes(
        lambda name, threads: Lane(name, finish, lambda items: None, mailbox, threads=threads), 4
    )
    lanes.submit([item(f"m{number}", workflow=True) for number in range(9)])
    lanes.submit([item("m9", workflow=True), item("other")])
    assert settled.wait(10)
    blocked.set()
    lanes.stop()


def test_there_is_no_lane_for_workflows_before_the_first_one(mailbox):
    made = []

    def make(name, threads):
        made.append((name, threads))
        return Lane(name, lambda items: None, lambda items: None, mailbox, threads=threads)

    lanes = FinishLanes(make, 4)
    lanes.submit([item("other")])
    assert made == [("finish", 4)]
    lanes.submit([item("m", workflow=True)])
    assert made == [("finish", 4), ("workflows", 1)]
    lanes.stop()


def test_inline_there_is_one_lane(mailbox):
    done = []
    lanes = FinishLanes(
        lambda name, threads: Lane(name, done.extend, lambda items: None, mailbox, threads=threads),
        0,
    )
    both = [item("m", workflow=True), item("other")]
    lanes.submit(both)
    assert lanes.waiting
    lanes.turn()
    assert done == both
    lanes.stop()
