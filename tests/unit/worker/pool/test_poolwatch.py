"""When a pool process counts as silent, ending or stuck: at the times that the rules state."""

import os

import pytest
from poolends import Item, Server, Watching

from aztask.support.parts import all_parts, failures
from aztask.worker.pool.dispatcher import (
    ENDING_SECONDS,
    IDLE_SECONDS,
    PING_SECONDS,
    SILENT_SECONDS,
    PoolWatch,
)
from aztask.worker.pool.forking import ForkedStarter
from aztask.worker.pool.link import PoolPlan
from aztask.worker.pool.pool import Pool

START = 1000.0


@pytest.fixture
def server():
    made = Server()
    made.read = list
    made.gone = False
    yield made
    made.close()


@pytest.fixture
def pool(server):
    made = Pool(PoolPlan("shop:app", 1, 1, "w7"), ForkedStarter(Watching(), server))
    made.fill()
    made.processes[0].ready = True
    made.processes[0].link.forked.wait = lambda seconds=None: None
    yield made
    for process in made.processes:
        process.close()


@pytest.fixture
def process(pool):
    return pool.processes[0]


@pytest.fixture
def watch(pool):
    return PoolWatch(pool)


def shown():
    return [failure.reason for failure in failures() if failure.part == "pool processes"]


def pings(process):
    """How often the process was asked since the last call."""
    count = 0
    os.set_blocking(process.link.forked.control.fileno(), False)
    try:
        while process.link.forked.control.receive() == ["ping", 0]:
            count += 1
    except BlockingIOError:
        pass
    return count


def test_a_process_that_answers_is_asked_again_and_again(process, watch):
    asked = 0
    for number in range(10):
        watch.tick(START + number * PING_SECONDS)
        asked += pings(process)
        watch.alive(process)
    assert asked == 10
    watch.tick(START + 9.5 * PING_SECONDS)
    assert pings(process) == 0, "not more often"
    assert shown() == []


def test_a_silent_process_is_shown_asked_once_and_not_killed(process, watch):
    process.send(Item(1), [1])
    process.link.board.note(0, 1, START)
    watch.tick(START)
    watch.tick(START + SILENT_SECONDS)
    assert shown() == []
    watch.tick(START + SILENT_SECONDS + 0.1)
    assert len(shown()) == 1
    assert f"{process} has not answered" in shown()[0]
    watch.tick(START + 100 * SILENT_SECONDS)
    assert pings(process) == 1
    assert process.link.forked.kills == 0
    watch.alive(process)
    watch.tick(START + 100 * SILENT_SECONDS + 1)
    assert shown() == []


def test_a_process_that_ended_while_it_was_silent_is_shown_no_longer(pool, process, watch):
    watch.tick(START)
    watch.tick(START + 2 * SILENT_SECONDS)
    assert len(shown()) == 1
    pool.processes.clear()
    watch.tick(START + 2 * SILENT_SECONDS + 1)
    assert shown() == []
    process.close()


def test_a_process_that_closed_its_connection_and_stays_is_killed(process, watch, caplog):
    watch.tick(START)
    process.link.forked.outbox.close()
    assert process.link.answers() == []
    assert process.link.hung_up
    watch.tick(START + 1)
    watch.tick(START + 1 + ENDING_SECONDS)
    assert process.link.forked.kills == 0, "it may be ending"
    watch.tick(START + 1.1 + ENDING_SECONDS)
    watch.tick(START + 9.0 + ENDING_SECONDS)
    assert process.link.forked.kills == 1
    assert process.ending() == "it closed its connection to the worker"
    assert caplog.text.count("is replaced: it closed its connection") == 1


def test_a_process_that_runs_nothing_of_what_it_has_is_killed(process, watch):
    watch.tick(START)
    watch.tick(START + 2 * IDLE_SECONDS)
    assert process.link.forked.kills == 0, "it has nothing"
    process.send(Item(1), [1])
    watch.tick(START + 3 * IDLE_SECONDS)
    process.link.board.note(0, 1, START)
    watch.tick(START + 5 * IDLE_SECONDS)
    process.link.board.clear(0)
    watch.tick(START + 6 * IDLE_SECONDS)
    watch.tick(START + 7 * IDLE_SECONDS)
    assert process.link.forked.kills == 0, "it has run something in between"
    watch.tick(START + 7 * IDLE_SECONDS + 0.1)
    assert process.link.forked.kills == 1
    assert process.ending() == "it was given tasks and ran none of them"


def test_a_process_that_is_not_ready_is_left_alone(process, watch):
    process.ready = False
    process.send(Item(1), [1])
    watch.tick(START)
    watch.tick(START + 10 * IDLE_SECONDS)
    assert process.link.forked.kills == 0
    assert pings(process) == 0


def test_its_part_is_listed(watch):
    assert "pool processes" in [part.name for part in all_parts()]
