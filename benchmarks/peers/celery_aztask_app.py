"""The tasks on Celery with aztask's Kombu transport, on the broker that AZTASK_BROKER names."""

import os
import time
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from marks import leave, ready

try:
    from aztask.celery import transport
except ImportError:  # a tree that `compare.py` compares with, from before the package had this name
    from aztask import transport

transport.register()
app = Celery("bench", broker="aztask://")
app.conf.update(
    task_ignore_result=True,
    task_default_queue=os.environ.get("COMPARE_QUEUE", "celery-bench"),
    task_acks_late=os.environ.get("BENCH_ACKS", "late") == "late",
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
if "BENCH_LEASE" in os.environ:
    app.conf.broker_transport_options = {"lease": float(os.environ["BENCH_LEASE"])}
worker_ready.connect(ready)


@app.task(name="noop")
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task(name="mark")
def mark(key: str, seconds: float = 0.0) -> None:
    """Leave a mark in the file of marks."""
    leave(key, seconds)


@app.task(name="again", bind=True, max_retries=1)
def again(self: Any, key: str, seconds: float, due: float | None = None) -> None:
    """Retry after `seconds`, and leave a mark ``KEY:DUE`` at that run."""
    if due is None:
        due = time.time() + seconds
        raise self.retry(args=(key, seconds, due), eta=datetime.fromtimestamp(due, UTC))
    leave(f"{key}:{due:.6f}")


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.delay()


def marks(prefix: str, count: int, seconds: float) -> None:
    """Send so many tasks that leave a mark."""
    for number in range(count):
        mark.delay(f"{prefix}{number}", seconds)


def timed(prefix: str, first: float, last: float, count: int) -> None:
    """Send tasks that leave a mark ``PREFIX-etaN:DUE``, and as many ``PREFIX-retryN:DUE``.

    The first ones have an eta, the others retry once with an eta. The times lie evenly between
    `first` and `last` seconds from now.
    """
    now = time.time()
    for number in range(count):
        due = now + first + (last - first) * number / count
        mark.apply_async((f"{prefix}-eta{number}:{due:.6f}",), eta=datetime.fromtimestamp(due, UTC))
        later = first + (last - first) * (number * 7 % count) / count
        again.delay(f"{prefix}-retry{number}", later)
