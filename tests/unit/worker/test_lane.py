"""Lanes: batches of a stage's work, inline or on threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from aztask.worker import lane as lanes
from aztask.worker.lane import BATCH, Lane, Work, lane_of
from aztask.worker.mailbox import EventMailbox


class Doing(Work[int]):
    """What a test does with the batches of a lane; those that came back are in `done_with`."""

    def __init__(self, work: Callable[[Sequence[int]], object], done_with: list[int]) -> None:
        self._work = work
        self.done_with = done_with

    def work(self, batch: Sequence[int]) -> None:
        self._work(batch)

    def done(self, batch: Sequence[int]) -> None:
        self.done_with += batch


class Turn:
    """The supervisor's side: it runs what lanes post, and keeps what came back."""

    def __init__(self) -> None:
        self.mailbox = EventMailbox()
        self.done: list[int] = []
        self.lanes: list[Lane[int]] = []

    def lane(self, work: Callable[[Sequence[int]], object], threads: int) -> Lane[int]:
        self.lanes.append(lane_of("test", Doing(work, self.done), self.mailbox, threads=threads))
        return self.lanes[-1]

    def until(self, count: int) -> None:
        give_up_at = time.monotonic() + 10.0
        while len(self.done) < count:
            assert time.monotonic() < give_up_at
            self.mailbox.wait(0.1)


@pytest.fixture
def turn() -> Iterator[Turn]:
    made = Turn()
    yield made
    for each in made.lanes:
        each.stop()
    made.mailbox.close()


def test_an_inline_lane_works_in_the_turn(turn):
    threads = []
    lane = turn.lane(lambda batch: threads.append(threading.current_thread()), 0)
    lane.submit([1, 2, 3])
    assert lane.waiting
    assert turn.done == []
    lane.turn()
    assert turn.done == [1, 2, 3]
    assert threads == [threading.current_thread()]


def test_what_comes_while_a_batch_is_under_way_is_the_next_batch(turn):
    started, go = threading.Event(), threading.Event()
    batches: list[list[int]] = []

    def work(batch: Sequence[int]) -> None:
        batches.append(list(batch))
        started.set()
        assert go.wait(10) or len(batches) > 1

    lane = turn.lane(work, 1)
    lane.submit([0])
    started.wait(10)
    for n in range(1, 6):
        lane.submit([n])
    go.set()
    turn.until(6)
    assert batches == [[0], [1, 2, 3, 4, 5]]


def test_as_long_as_one_thread_keeps_up_no_other_works_beside_it(turn, monkeypatch):
    monkeypatch.setattr(lanes, "PATIENCE", 60.0)  # however slow the machine is
    alone = threading.Lock()
    beside = []

    def work(batch: Sequence[int]) -> None:
        if not alone.acquire(blocking=False):
            beside.append(batch)
            return
        time.sleep(0.001)
        alone.release()

    lane = turn.lane(work, 4)
    for n in range(200):
        lane.submit([n])
        time.sleep(0.0005)
    turn.until(200)
    assert sorted(turn.done) == list(range(200))
    assert beside == []


def test_a_batch_that_is_stuck_holds_up_nothing_behind_it(turn):
    taken, stuck = threading.Event(), threading.Event()

    def work(batch: Sequence[int]) -> None:
        if 0 in batch:
            taken.set()
            stuck.wait(30)

    lane = turn.lane(work, 3)
    lane.submit([0])
    assert taken.wait(10)
    lane.submit(range(1, 10))
    turn.until(9)
    assert 0 not in turn.done
    assert len(lane) == 1
    stuck.set()
    turn.until(10)
    assert len(lane) == 0


def test_several_stuck_batches_take_a_thread_each(turn):
    taken, stuck = threading.Semaphore(0), threading.Event()

    def work(batch: Sequence[int]) -> None:
        taken.release()
        stuck.wait(30)

    lane = turn.lane(work, 3)
    for n in range(3):
        lane.submit([n])
        assert taken.acquire(timeout=10)
    lane.submit([3])
    assert not taken.acquire(timeout=0.1), "there is no fourth thread"
    assert turn.done == []
    stuck.set()
    turn.until(4)


def test_large_crowds_are_split(turn):
    sizes = []
    lane = turn.lane(lambda batch: sizes.append(len(batch)), 1)
    lane.submit(range(BATCH * 2 + 5))
    turn.until(BATCH * 2 + 5)
    assert max(sizes) == BATCH


def test_a_batch_that_fails_comes_back(turn, caplog):
    def work(batch: Sequence[int]) -> None:
        raise ValueError("no")

    lane = turn.lane(work, 2)
    lane.submit([1, 2])
    turn.until(2)
    assert "part test failed unexpectedly, 2 items are tried again" in caplog.text


def test_stopping_does_what_is_queued(turn):
    count = []
    lane = turn.lane(lambda batch: count.extend(batch) or time.sleep(0.01), 4)
    for n in range(50):
        lane.submit([n])
    lane.stop()
    assert sorted(count) == list(range(50))


def test_nothing_is_left_lying_whatever_the_rhythm(turn):
    lane = turn.lane(lambda batch: time.sleep(0.0003), 4)
    for n in range(3000):
        lane.submit([n])
        if n % 7 == 0:
            time.sleep(0.0004)
    turn.until(3000)
    assert sorted(turn.done) == list(range(3000))
