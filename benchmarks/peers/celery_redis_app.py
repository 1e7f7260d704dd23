"""The no-op on Celery with Kombu's Redis transport."""

import os

from celery import Celery
from celery.signals import worker_ready
from marks import ready

app = Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.update(
    task_ignore_result=True,
    task_default_queue="celery-bench",
    task_acks_late=os.environ.get("BENCH_ACKS", "late") == "late",
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
worker_ready.connect(ready)


@app.task(name="noop")
def noop() -> None:
    """Do nothing, to measure only the overhead."""


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.delay()
