"""Probes: what counts as live and as ready."""

from __future__ import annotations

import threading

import pytest

from aztask.errors import BrokerUnavailable
from aztask.hooks import WorkerStatus
from aztask.telemetry.health import SILENT_SECONDS, STUCK_SECONDS, Contact, Health


class Bench:
    """A worker with one service; the test sets the time and the service's answers."""

    def __init__(self):
        self.time = 1000.0
        self.error = None
        self.contact = Contact("broker", self.ask, now=lambda: self.time)
        self.health = Health([self.contact], now=lambda: self.time)

    def ask(self):
        if self.error is not None:
            raise self.error

    def report(self, *, ready=1, draining=False):
        self.health.status(WorkerStatus(self.time, 2, ready, (), 0, draining))


@pytest.fixture
def bench():
    made = Bench()
    made.report()
    made.contact.ask()
    return made


def test_a_worker_that_can_run_tasks_is_ready(bench):
    assert bench.health.not_ready() == ""
    assert bench.health.not_live() == ""


def test_before_the_first_answers_it_is_live_and_not_ready():
    made = Bench()
    assert made.health.not_live() == ""
    assert made.health.not_ready().splitlines() == [
        "no pool process is ready",
        "broker: it has not answered yet",
    ]


def test_a_service_that_refuses_is_lost_at_once_and_until_it_answers(bench, caplog):
    bench.error = BrokerUnavailable("no route\nSharedAccessKey=hunter2hunter2")
    bench.contact.ask()
    assert bench.health.not_ready() == "broker: no route"
    assert bench.health.not_live() == ""
    bench.contact.ask()
    assert caplog.text.count("does not answer") == 1, "once for each loss"
    bench.error = None
    bench.contact.ask()
    assert bench.health.not_ready() == ""


def test_a_service_that_is_silent_is_lost(bench):
    bench.time += SILENT_SECONDS + 0.1
    bench.report()
    assert bench.health.not_ready() == "broker: no answer for 12 s"


@pytest.mark.parametrize(
    ("report", "reason"),
    [({"ready": 0}, "no pool process is ready"), ({"draining": True}, "the worker is stopping")],
)
def test_a_worker_that_takes_no_tasks_is_not_ready_but_live(bench, report, reason):
    bench.report(**report)
    assert bench.health.not_ready() == reason
    assert bench.health.not_live() == ""


def test_a_loop_that_no_longer_turns_is_not_live(bench):
    bench.time += STUCK_SECONDS + 1
    bench.contact.ask()
    assert bench.health.not_live() == "the worker has been stuck for 61 s"
    assert bench.health.not_ready() == "the worker has been stuck for 61 s"


def test_a_service_that_hangs_delays_no_other():
    hanging, asked = threading.Event(), threading.Event()
    slow = Contact("broker", lambda: hanging.wait(30))
    quick = Contact("result store", asked.set)
    health = Health([slow, quick])
    health.start()
    assert asked.wait(5)
    health.stop()
    hanging.set()
    assert slow.problem != ""


def test_an_unexpected_error_is_no_outage_and_is_logged_once_with_its_traceback(bench, caplog):
    bench.error = ValueError("a bug")
    for _ in range(3):
        bench.contact.ask()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "does not answer" not in record.message
    assert bench.health.not_ready() == "broker: a bug"
    bench.error = BrokerUnavailable("away")
    bench.contact.ask()
    bench.error = None
    bench.contact.ask()
    assert bench.health.not_ready() == ""
