"""The intake of a queue, over the local broker in memory: one thread, and those that help."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import waiting

from aztask.errors import (
    BrokerUnavailable,
    CapabilityError,
    ConfigurationError,
    LeaseRefused,
    QueueNotFound,
)
from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.worker.intake.queueintake import Intake
from aztask.worker.ports import QueueSource

LIMIT = 4
PATIENCE = 10.0


def wait_until(condition):
    waiting.wait_until(condition, PATIENCE, "what the test waits for")


class Gate:
    """A receiver that notes who receives, and lets nobody through while it is shut."""

    def __init__(self, receiver):
        self._receiver = receiver
        self.open = threading.Event()
        self.open.set()
        self.inside = []
        self.looks = []
        self.failure = None

    def receive(self, limit, wait):
        name = threading.current_thread().name
        self.inside.append(name)
        self.looks.append((name, limit, wait))
        try:
            assert self.open.wait(PATIENCE)
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            return self._receiver.receive(limit, wait)
        finally:
            self.inside.remove(name)

    def __getattr__(self, name):
        return getattr(self._receiver, name)


class Wide(LocalBroker):
    """Says of itself that batches are small, and that two receives at once pay."""

    @property
    def capabilities(self):
        return replace(super().capabilities, receive_limit=LIMIT, receives_at_once=2)

    def receiver(self, queue, **options):
        self.gate = Gate(super().receiver(queue, **options))
        return self.gate


class Bench:
    def __init__(self):
        self.database = Database(":memory:")
        self.broker = Wide(self.database)
        self.taken, self.refusals = [], []
        self.intake = Intake(self.broker, QueueSource("jobs", 0.1), self)
        self.gate = self.intake.receiver

    def lease(self, queue):
        return 30.0

    def take(self, source, got, asked_at):
        self.taken += got

    def refused(self, error):
        self.refusals.append(error)

    def send(self, count):
        self.broker.send("jobs", [Envelope(b"x") for _ in range(count)])

    def helper_looks(self):
        return [look for look in self.gate.looks if look[0].endswith("-1")]

    def close(self):
        self.gate.open.set()
        self.intake.stop()
        self.intake.join(PATIENCE)
        self.intake.close()
        self.database.close()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def test_a_second_thread_helps_while_batches_are_full_and_looks_once(bench):
    bench.send(3 * LIMIT)
    bench.intake.start()
    bench.gate.open.clear()
    bench.intake.allow(100)
    wait_until(lambda: bench.gate.inside == ["aztask-in-jobs-0"])
    bench.gate.open.set()
    wait_until(lambda: len(bench.taken) == 3 * LIMIT)
    wait_until(lambda: bench.intake.idle)
    assert all(limit == LIMIT and wait == 0 for _, limit, wait in bench.helper_looks())
    assert len({delivery.position for delivery in bench.taken}) == 3 * LIMIT


def test_both_receive_at_once(bench):
    bench.send(20 * LIMIT)
    bench.intake.start()
    bench.intake.allow(LIMIT)  # the first batch is full, and there is no room for another
    wait_until(lambda: len(bench.taken) == LIMIT)
    bench.gate.open.clear()
    bench.intake.allow(2 * LIMIT)
    wait_until(lambda: len(bench.gate.inside) == 2)
    assert not bench.intake.idle
    bench.gate.open.set()
    wait_until(lambda: len(bench.taken) == 3 * LIMIT)


def test_what_is_under_way_counts_as_taken(bench):
    bench.send(20 * LIMIT)
    bench.intake.start()
    bench.intake.allow(LIMIT)
    wait_until(lambda: len(bench.taken) == LIMIT)
    bench.intake.allow(2 * LIMIT - 1)  # room for one batch and a little
    wait_until(lambda: len(bench.taken) == 3 * LIMIT - 1)
    time.sleep(0.2)
    assert len(bench.taken) == 3 * LIMIT - 1
    assert {limit for _, limit, _ in bench.helper_looks()} <= {LIMIT}


def test_a_queue_that_is_not_busy_costs_no_look_more(bench):
    bench.send(LIMIT - 1)
    bench.intake.start()
    bench.intake.allow(100)
    wait_until(lambda: len(bench.taken) == LIMIT - 1)
    wait_until(lambda: bench.intake.idle)
    assert bench.helper_looks() == []


def test_a_failure_ends_the_help_until_a_batch_is_full_again(bench):
    bench.send(LIMIT)
    bench.intake.start()
    bench.gate.failure = BrokerUnavailable("away")
    bench.intake.allow(100)
    wait_until(lambda: len(bench.taken) == LIMIT)
    wait_until(lambda: bench.intake.idle)
    assert len(bench.helper_looks()) <= 1


def test_a_queue_that_does_not_exist_is_empty(bench):
    def missing(limit, wait):
        raise QueueNotFound("there is no queue jobs")

    bench.gate.receive = missing
    bench.intake.start()
    bench.intake.allow(100)
    wait_until(lambda: bench.intake.idle)


@pytest.mark.parametrize("kind", [ConfigurationError, CapabilityError])
def test_a_configuration_error_before_anything_was_received_is_told_and_not_retried(bench, kind):
    error = bench.gate.failure = kind("no permission")
    bench.intake.start()
    bench.intake.allow(5)
    wait_until(lambda: bench.refusals == [error])
    wait_until(lambda: not bench.intake._threads[0].is_alive())
    assert len(bench.gate.looks) == 1


@pytest.mark.parametrize(
    "error", [LeaseRefused("another lock"), BrokerUnavailable("away"), ValueError("a bug")]
)
def test_what_may_get_better_is_retried_from_the_start(bench, monkeypatch, error):
    monkeypatch.setattr("aztask.worker.intake.queueintake.LONGEST_PAUSE", 0.05)
    bench.send(1)
    bench.gate.failure = error
    bench.intake.start()
    bench.intake.allow(5)
    wait_until(lambda: len(bench.taken) == 1)
    assert bench.refusals == []


def test_a_configuration_error_of_a_queue_that_worked_is_retried(bench, monkeypatch):
    """A key may be replaced, or a permission come back, while the worker runs."""
    monkeypatch.setattr("aztask.worker.intake.queueintake.LONGEST_PAUSE", 0.05)
    bench.send(1)
    bench.intake.start()
    bench.intake.allow(5)
    wait_until(lambda: len(bench.taken) == 1)
    bench.gate.failure = ConfigurationError("the key was replaced")
    wait_until(lambda: bench.gate.failure is None)
    bench.send(1)
    wait_until(lambda: len(bench.taken) == 2)
    assert bench.refusals == []
