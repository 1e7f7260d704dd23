"""The worker's side of the pool: feeding, taking back, and how a process ended."""

import os
import socket
from types import SimpleNamespace

import pytest

from aztask.worker.pool.children import (
    AHEAD_SECONDS,
    MOST_AHEAD,
    STUCK_SECONDS,
    Pool,
    PoolPlan,
    PoolProcess,
)
from aztask.worker.pool.packets import Packets


class Server:
    """A fork server whose processes are the test: it keeps their ends of the sockets."""

    def __init__(self):
        self.forked = []

    def fork(self, setup, descriptors):
        # the worker closes two of its duplicates: the test needs descriptors of its own
        ends = [Packets(socket.socket(fileno=os.dup(each))) for each in descriptors[:3]]
        inbox, outbox, control = ends
        made = SimpleNamespace(
            setup=setup, inbox=inbox, outbox=outbox, control=control, pid=4242, status=None,
            failed="", kills=0, close=lambda: None, wait=lambda: None,
        )  # fmt: skip
        made.kill = lambda: setattr(made, "kills", made.kills + 1)
        self.forked.append(made)
        return made

    def close(self):
        for each in self.forked:
            for end in (each.inbox, each.outbox, each.control):
                end.close()


class Item:
    """A delivery as the pool sees it."""

    def __init__(self, number):
        self.number = number
        self.steps = []

    def sent(self):
        self.steps.append("sent")

    def taken_back(self):
        self.steps.append("taken back")


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def process(server):
    made = PoolProcess(server, PoolPlan("shop:app", 1, 1, "w7"))
    yield made
    made.close()


def packet(item):
    return [item.number]


def test_what_is_sent_arrives_and_what_is_unread_can_be_taken_back(process):
    first, second = Item(1), Item(2)
    assert process.send(first, [1])
    assert process.send(second, [2])
    assert process.forked.inbox.receive() == [1]
    assert process.take_back() == [second]
    assert process.items == {1: first}
    assert (first.steps, second.steps) == (["sent"], ["sent", "taken back"])


def test_a_full_socket_takes_no_more(process):
    big = b"x" * 50_000
    sent = 0
    while process.send(Item(sent), [sent, big]):
        sent += 1
        assert sent < 1000
    assert 0 < sent == len(process.items)


def test_answers_and_control_packets(process):
    process.forked.outbox.send(["ready"])
    process.forked.outbox.send(["done", 1])
    assert process.answers() == [["ready"], ["done", 1]]
    assert process.answers() == []
    process.tell(["renewed", 1, 5.0])
    assert process.forked.control.receive() == ["renewed", 1, 5.0]


def test_running_is_what_the_board_says(process):
    item = Item(7)
    process.send(item, [7])
    assert process.running() == []
    process.board.note(0, 7, 3.5)
    assert process.running() == [(item, 3.5)]


@pytest.mark.parametrize(
    ("status", "failed", "words"),
    [
        (None, "", "ended together with the pool's fork server"),
        (3, "", "exited with status 3"),
        (-11, "", "was ended by SIGSEGV"),
        (-99, "", "was ended by signal 99"),
        (None, "no memory", "cannot start: no memory"),
    ],
)
def test_how_it_ended_in_words(process, status, failed, words):
    process.forked.status, process.forked.failed = status, failed
    assert words in process.ending()


def test_the_first_reason_to_kill_it_counts(process):
    process.kill("the time limit was exceeded", 7)
    process.kill("the worker ended")
    assert process.ending() == "the time limit was exceeded"
    assert (process.culprit, process.forked.kills) == (7, 1)


@pytest.fixture
def pool(server):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    made = Pool(PoolPlan("shop:app", 2, 1, "w7"), clock=clock, server=server)
    made.fill()
    made.processes[0].ready = True
    made.fill()
    for process in made.processes:
        process.ready = True
    yield made
    made.close()


def test_the_second_process_starts_when_the_first_is_ready(server):
    pool = Pool(PoolPlan("shop:app", 2, 1), server=server)
    pool.fill()
    assert len(pool.processes) == 1
    pool.processes[0].ready = True
    pool.fill()
    assert len(pool.processes) == 2
    pool.close()


def test_deliveries_go_to_the_process_with_the_most_room(pool):
    items = [Item(number) for number in range(3)]
    assert pool.room() == 2
    assert pool.feed(items, packet) == items[2:]
    assert [list(process.items) for process in pool.processes] == [[0], [1]]
    assert pool.room() == 0


@pytest.mark.parametrize(
    ("mean", "ahead"),
    [(None, 0), (AHEAD_SECONDS, 0), (AHEAD_SECONDS / 4, 4), (0.0, MOST_AHEAD)],
)
def test_only_short_tasks_are_sent_ahead(pool, mean, ahead):
    pool.mean_seconds = mean
    assert pool.room() == 2 * (1 + ahead)


def test_the_mean_rises_at_once_and_falls_slowly(pool):
    pool.observe(1.0)
    pool.observe(2.0)
    assert pool.mean_seconds == 2.0
    pool.observe(1.0)
    assert pool.mean_seconds == pytest.approx(1.95)


def test_what_waits_behind_a_long_task_is_taken_back(pool):
    pool.mean_seconds = AHEAD_SECONDS / 4
    items = [Item(number) for number in (1, 2, 3)]
    for item in items:
        pool.processes[0].send(item, [item.number])
    assert pool.processes[0].forked.inbox.receive() == [1]
    pool.processes[0].board.note(0, 1, 10.0)
    assert pool.take_back_stuck(9.99 + STUCK_SECONDS) == []
    assert pool.take_back_stuck(10.01 + STUCK_SECONDS) == items[1:]
    assert pool.mean_seconds == STUCK_SECONDS
