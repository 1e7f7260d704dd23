"""What `known` says of a test that fails on Storage queues, shown on Redis.

A worker of Celery lists the tasks with an ``eta`` that it holds itself. What waits in the broker is
in no list, and which of both it is depends on whether a worker has room to take it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

WAITS = timedelta(seconds=60)


@pytest.fixture
def app() -> Celery:
    app = Celery("on-redis", broker=os.environ["TEST_BROKER"], backend=os.environ["TEST_BACKEND"])
    app.conf.update(
        task_default_queue="waits-in-the-broker", worker_prefetch_multiplier=1, task_acks_late=True
    )
    return app


@pytest.fixture
def busy(app: Celery) -> Iterator[threading.Event]:
    """A worker with one slot, which a task holds until the event is set."""
    begun, release = threading.Event(), threading.Event()

    @app.task(name="hold", shared=False)
    def hold() -> None:
        begun.set()
        release.wait(WAITS.total_seconds())

    @app.task(name="later", shared=False)
    def later() -> None:
        """Only waits for its time."""

    with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False):
        hold.delay()
        assert begun.wait(30)
        yield release
        release.set()


def test_what_no_worker_holds_is_not_listed(app: Celery, busy: threading.Event) -> None:
    task_id = app.tasks["later"].apply_async(eta=datetime.now(UTC) + WAITS).id
    time.sleep(2.0)  # a worker that had room would have taken it
    assert scheduled(app) == []
    busy.set()
    until(lambda: scheduled(app) == [task_id])


def scheduled(app: Celery) -> list[str]:
    """The ids that all workers list."""
    answers = app.control.inspect(timeout=2.0).scheduled() or {}
    return [entry["request"]["id"] for entries in answers.values() for entry in entries]


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.2)
