"""The worker's side of the pool: feeding, taking back, and how a process ended."""

from types import SimpleNamespace

import pytest
from poolends import Item, Server, Watching, started
from runtimes import Noting

from aztask.worker.pool.forking import ForkedStarter
from aztask.worker.pool.link import PoolPlan
from aztask.worker.pool.pool import (
    AHEAD_SECONDS,
    MOST_AHEAD,
    STUCK_SECONDS,
    Pool,
)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def process(server):
    made = started(server, PoolPlan("shop:app", 1, 1, "w7"))
    yield made
    made.close()


def packet(item):
    return [item.number]


def test_what_is_sent_arrives_and_what_is_unread_can_be_taken_back(process):
    first, second = Item(1), Item(2)
    assert process.send(first, [1])
    assert process.send(second, [2])
    assert process.link.forked.inbox.receive() == [1]
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
    process.link.forked.outbox.send(["ready"])
    process.link.forked.outbox.send(["done", 1])
    assert process.link.answers() == [["ready"], ["done", 1]]
    assert process.link.answers() == []
    process.tell(["renewed", 1, 5.0])
    assert process.link.forked.control.receive() == ["renewed", 1, 5.0]


def test_running_is_what_the_board_says(process):
    item = Item(7)
    process.send(item, [7])
    assert process.running() == []
    process.link.board.note(0, 7, 3.5)
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
    process.link.forked.status, process.link.forked.failed = status, failed
    assert words in process.ending()


def test_the_first_reason_to_kill_it_counts(process):
    process.kill("the time limit was exceeded", 7)
    process.kill("the worker ended")
    assert process.ending() == "the time limit was exceeded"
    assert (process.culprit, process.link.forked.kills) == (7, 1)


@pytest.fixture
def pool(server):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    made = Pool(PoolPlan("shop:app", 2, 1, "w7"), ForkedStarter(Watching(), server), clock=clock)
    made.fill()
    made.processes[0].ready = True
    made.fill()
    for process in made.processes:
        process.ready = True
    yield made
    made.close()


def test_the_second_process_starts_when_the_first_is_ready(server):
    pool = Pool(PoolPlan("shop:app", 2, 1), ForkedStarter(Watching(), server))
    pool.fill()
    assert len(pool.processes) == 1
    pool.processes[0].ready = True
    pool.fill()
    assert len(pool.processes) == 2
    pool.close()


def test_deliveries_go_to_the_process_with_the_most_room(pool):
    items = [Item(number) for number in range(3)]
    assert pool.room() == 2
    assert pool.feed(items, packet, Noting()) == items[2:]
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
    assert pool.processes[0].link.forked.inbox.receive() == [1]
    pool.processes[0].link.board.note(0, 1, 10.0)
    assert pool.take_back_stuck(9.99 + STUCK_SECONDS) == []
    assert pool.take_back_stuck(10.01 + STUCK_SECONDS) == items[1:]
    assert pool.mean_seconds == STUCK_SECONDS


class Scaled:
    """A pool over the server of the test, whose processes get ready when it says so."""

    def __init__(self, server, plan):
        self.pool = Pool(plan, ForkedStarter(Watching(), server))
        self.pool.fill()
        self.ready()

    def scale(self, concurrency):
        self.pool.scale(concurrency)
        self.pool.fill()

    def ready(self):
        for process in self.pool.processes:
            process.ready = True
        self.pool.fill()
        for process in self.pool.processes:
            process.ready = True

    def end(self):
        """Let the processes end that were retired and run nothing."""
        for process in [each for each in self.pool.processes if each.retiring and not each.items]:
            self.pool.ended(process)
        self.pool.fill()

    def send(self, *numbers):
        batch = [Item(number) for number in numbers]
        return [item.number for item in self.pool.feed(batch[: self.pool.room()], packet, Noting())]

    def close(self):
        for process in self.pool.processes:
            process.close()


@pytest.fixture
def scaled(server):
    made = []

    def make(processes, slots, pool="processes"):
        made.append(Scaled(server, PoolPlan("shop:app", processes, slots, "w", pool)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_pool_of_processes_grows_by_processes(scaled):
    bench = scaled(2, 1)
    bench.scale(4)
    bench.ready()
    assert (len(bench.pool.processes), bench.pool.capacity, bench.pool.room()) == (4, 4, 4)
    assert bench.pool.shrink() == []
    assert not any(process.retiring for process in bench.pool.processes)


def test_the_only_process_is_replaced_because_tasks_of_it_may_not_wait_for_others(scaled):
    bench = scaled(1, 1)
    (old,) = bench.pool.processes
    assert old.alone
    bench.scale(2)
    bench.ready()
    bench.pool.shrink()
    assert old.retiring
    bench.end()
    assert [process.alone for process in bench.pool.processes] == [False, False]
    bench.pool.shrink()
    assert bench.pool.room() == 2


def test_the_idle_processes_of_a_pool_end_first_and_running_tasks_go_on(scaled):
    bench = scaled(4, 1)
    bench.send(1, 2, 3)
    busy = [process for process in bench.pool.processes if process.items]
    for process in busy:  # it reads its delivery, so that it runs
        assert process.link.forked.inbox.receive()
    bench.scale(2)
    assert bench.pool.room() == 0, "at most two may run, and three do"
    assert bench.pool.shrink() == []
    assert [process.retiring for process in bench.pool.processes].count(True) == 2
    bench.end()
    assert bench.pool.processes == busy
    for process in busy:
        process.items.clear()
    bench.end()
    bench.pool.shrink()
    assert (len(bench.pool.processes), bench.pool.room()) == (2, 2)


def test_what_a_retired_process_has_not_read_goes_to_others(scaled):
    bench = scaled(3, 1)
    bench.send(1, 2, 3)
    bench.scale(2)
    taken = bench.pool.shrink()
    assert [item.steps for item in taken] == [["sent", "taken back"]]
    assert sum(len(process.items) for process in bench.pool.processes) == 2


def test_a_process_with_slots_is_replaced_when_the_new_one_is_ready(scaled):
    bench = scaled(1, 4, "threads")
    (old,) = bench.pool.processes
    bench.send(1, 2, 3)
    bench.scale(8)
    assert len(bench.pool.processes) == 2
    new = bench.pool.processes[1]
    assert (new.slots, bench.pool.shrink(), old.retiring) == (8, [], False)
    assert bench.pool.room() == 1, "the old one has a free slot, and the new one is not ready"
    bench.ready()
    for _ in range(3):
        assert old.link.forked.inbox.receive()
    assert bench.pool.shrink() == []
    assert old.retiring
    assert bench.pool.room() == 5, "three of the eight run in the old process"
    bench.send(4)
    assert list(new.items) == [4]
    old.items.clear()
    bench.end()
    bench.pool.shrink()
    assert (bench.pool.processes, bench.pool.room()) == ([new], 7)


def test_a_pool_that_is_scaled_again_before_the_first_change_is_done(scaled):
    bench = scaled(1, 4, "asyncio")
    bench.scale(8)
    bench.scale(2)
    bench.ready()
    bench.pool.shrink()
    assert [(each.slots, each.retiring) for each in bench.pool.processes] == [
        (4, True),
        (8, True),
        (2, False),
    ]
    bench.end()
    bench.pool.shrink()
    assert [each.slots for each in bench.pool.processes] == [2]
    assert bench.pool.room() == 2
