"""The two tasks on Celery with Kombu's Azure Storage queue transport."""

import os

from celery import Celery
from celery.signals import worker_ready
from marks import leave, ready

app = Celery(
    "bench",
    broker=f"azurestoragequeues://{os.environ['BENCH_KEY']}@{os.environ['BENCH_ENDPOINT']}",
)
app.conf.update(
    task_ignore_result=True,
    broker_transport_options={"queue_name_prefix": "celery-"},
    task_default_queue="bench",
    task_acks_late=os.environ.get("BENCH_ACKS", "late") == "late",
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
worker_ready.connect(ready)


@app.task(name="noop")
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task(name="mark")
def mark(key: str, seconds: float = 0.0) -> None:
    """Leave a mark in the file of marks."""
    leave(key, seconds)


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.delay()


def marks(prefix: str, count: int, seconds: float) -> None:
    """Send so many tasks that leave a mark."""
    for number in range(count):
        mark.delay(f"{prefix}{number}", seconds)
