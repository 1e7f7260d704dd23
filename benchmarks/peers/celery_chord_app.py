"""A chord on Celery with Redis as its broker and result backend."""

import os
import time

from celery import Celery

address = os.environ["BENCH_REDIS"]
app = Celery("bench", broker=address, backend=address)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="page")
def page(number: int, seconds: float = 0.0) -> int:
    """Return the member's number, after so many seconds."""
    time.sleep(seconds)
    return number


@app.task(name="book")
def book(numbers: list[int]) -> int:
    """Return how many members there were."""
    return len(numbers)
