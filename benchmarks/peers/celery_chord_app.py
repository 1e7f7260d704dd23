"""A chord on Celery, with the broker and the result backend of the environment."""

import os
import time

from celery import Celery

app = Celery(
    "bench", broker=os.environ["BENCH_CELERY_BROKER"], backend=os.environ["BENCH_CELERY_BACKEND"]
)
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
