"""How queues share the room of a worker by weight: a worker that is played turn by turn."""

from collections import Counter

import pytest

from aztask.worker.intake.allintakes import GIVE_UP, Shares

WEIGHTS = {"high": 4, "low": 1}


class Plain:
    """A queue with messages; like an intake, it brings what it is granted."""

    def __init__(self, queue, messages):
        self.queue = queue
        self.messages = messages
        self.live = False
        self.room = 0

    def grant(self, change):
        self.room += change

    def receive(self):
        found = min(self.room, self.messages)
        if self.room > 0:
            self.messages -= found
            self.room -= found
            self.live = found > 0
        return found


class Sessions:
    def __init__(self, queue, working=0, idle=False):
        self.queue = queue
        self.working = working
        self.idle = idle
        self.room = None

    def allow(self, room):
        self.room = room


class Worker:
    """Runs what it holds: one delivery ends in each turn."""

    def __init__(self, window, *queues, weights=WEIGHTS, ahead=False):
        self.window = window
        self.ahead = ahead
        self.queues = queues
        self.shares = Shares(weights, queues, [])
        self.held = []
        self.received = []
        self.paused = frozenset()

    def turn(self):
        self.allow()
        for queue in self.queues:
            found = queue.receive()
            if found:
                self.shares.received(queue.queue, found)
                self.held += [queue.queue] * found
                self.received += [queue.queue] * found
        if self.held:
            self.held.pop(0)

    def allow(self, **more):
        room = self.window - len(self.held)
        given = {"ahead": self.ahead, "wait": False, "paused": self.paused, **more}
        self.shares.allow(room, self.window, **given)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_queues_with_messages_get_places_by_their_weights(window):
    worker = Worker(window, Plain("high", 10_000), Plain("low", 10_000))
    for _ in range(1000):
        worker.turn()
    counts = Counter(worker.received[200:])
    assert counts["high"] / counts["low"] == pytest.approx(4.0, rel=0.05)
    assert len(worker.held) <= window + 1, "it holds no more than it wants, but for the first turn"


@pytest.mark.parametrize("window", [1, 8])
def test_an_empty_queue_costs_no_share(window):
    worker = Worker(window, Plain("high", 0), Plain("low", 1000))
    for _ in range(300):
        worker.turn()
    assert len(worker.received) >= 299
    assert set(worker.received) == {"low"}


def test_a_queue_that_runs_empty_leaves_its_places_to_the_others():
    worker = Worker(4, Plain("high", 20), Plain("low", 1000))
    for _ in range(100):
        worker.turn()
    assert Counter(worker.received)["high"] == 20
    assert len(worker.received) >= 97, "no turn was lost for long"


def test_a_message_of_a_high_priority_passes_what_was_prefetched():
    high, low = Plain("high", 0), Plain("low", 1000)
    worker = Worker(100, high, low, ahead=True)
    for _ in range(5):
        worker.turn()
    assert len(worker.held) >= 99, "the worker holds all that it wants"
    high.messages = 1
    worker.turn()
    assert "high" in worker.held, "it is received nevertheless"


def test_without_prefetch_a_full_worker_receives_nothing_more():
    high, low = Plain("high", 0), Plain("low", 1000)
    worker = Worker(3, high, low)
    worker.turn()
    worker.held = ["low"] * 3
    worker.allow()
    assert high.room == 0


def test_a_paused_queue_gets_nothing_and_costs_nothing():
    worker = Worker(4, Plain("high", 1000), Plain("low", 1000))
    worker.turn()
    worker.paused = frozenset({"high"})
    worker.allow()
    before = len(worker.received)
    for _ in range(50):
        worker.turn()
    assert set(worker.received[before:]) == {"low"}
    assert len(worker.received) - before >= 48
    worker.paused = frozenset()
    for _ in range(50):
        worker.turn()
    assert Counter(worker.received[-25:])["high"] >= 18


def test_a_fuller_batch_is_waited_for():
    high, low = Plain("high", 1000), Plain("low", 1000)
    worker = Worker(100, high, low)
    worker.turn()
    high.live = low.live = True
    high.room = low.room = 0
    worker.shares._granted.clear()
    worker.held.clear()
    worker.allow(wait=True)
    assert (high.room, low.room) == (0, 0)
    worker.allow()
    assert high.room > low.room > 0


def test_sessions_get_places_by_weight():
    busy, other = Sessions("high", working=2), Sessions("low", working=1)
    shares = Shares(WEIGHTS, [], [busy, other])
    shares.allow(5, 10, ahead=False, wait=False, paused=frozenset())
    assert (busy.room, other.room) == (6, 1)
    busy.idle, busy.working = True, 0
    shares.allow(5, 10, ahead=False, wait=False, paused=frozenset())
    assert other.room == 9, "a queue without messages costs nothing"


def test_too_many_sessions_of_a_queue_are_given_up():
    greedy, other = Sessions("low", working=10), Sessions("high", working=0)
    shares = Shares(WEIGHTS, [], [greedy, other])
    shares.allow(0, 10, ahead=False, wait=False, paused=frozenset())
    assert greedy.room == GIVE_UP
    assert other.room == 1, "it may begin with one although the worker is full"
    shares.allow(0, 10, ahead=False, wait=False, paused=frozenset({"high"}))
    assert (greedy.room, other.room) == (0, GIVE_UP)
