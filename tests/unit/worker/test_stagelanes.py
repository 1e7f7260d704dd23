"""The finish lanes: a workflow's tasks never delay the settlement of any other task."""

import threading
from types import SimpleNamespace

import pytest

from aztask.worker.core import FinishLanes
from aztask.worker.lane import Work, lane_of
from aztask.worker.mailbox import EventMailbox


@pytest.fixture
def mailbox():
    made = EventMailbox()
    yield made
    made.close()


class Finishes(Work):
    """Finishes with what a test does for that; what came back is in `over`."""

    def __init__(self, work):
        self.over = []
        self._work = work

    def work(self, batch):
        self._work(batch)

    def done(self, batch):
        self.over += batch


def lanes_of(work, mailbox, threads):
    """The lanes, and the (name, threads) of each that was made."""
    made = []

    def lane(name, work, *, threads, essential=""):
        made.append((name, threads))
        return lane_of(name, work, mailbox, threads=threads, essential=essential)

    runtime = SimpleNamespace(lane=lane, lane_threads=threads)
    return FinishLanes(runtime, Finishes(work)), made


def item(name, *, workflow=False):
    return SimpleNamespace(name=name, place=object() if workflow else None)


def test_a_workflow_that_waits_for_its_row_delays_no_other_task(mailbox):
    blocked, settled = threading.Event(), threading.Event()

    def finish(items):
        if any(each.place is not None for each in items):
            blocked.wait(20)
        else:
            settled.set()

    lanes, _ = lanes_of(finish, mailbox, 4)
    lanes.submit([item(f"m{number}", workflow=True) for number in range(9)])
    lanes.submit([item("m9", workflow=True), item("other")])
    assert settled.wait(10)
    blocked.set()
    lanes.stop()


def test_there_is_no_lane_for_workflows_before_the_first_one(mailbox):
    lanes, made = lanes_of(lambda items: None, mailbox, 4)
    lanes.submit([item("other")])
    assert made == [("finish", 4)]
    lanes.submit([item("m", workflow=True)])
    assert made == [("finish", 4), ("workflows", 1)]
    lanes.stop()


def test_inline_there_is_one_lane(mailbox):
    done = []
    lanes, made = lanes_of(done.extend, mailbox, 0)
    both = [item("m", workflow=True), item("other")]
    lanes.submit(both)
    assert lanes.waiting
    lanes.turn()
    assert done == both
    assert made == [("finish", 0)]
    lanes.stop()
