"""Tasks of one name for Celery and for aztask: each end is a line in a file that all append to."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from fleetprocesses import note

from aztask import App, Context, Retry, RetryPolicy, transport

transport.register()
PLACE = os.environ["PLACE"]
LEASE = 3
ADDRESS = f"local://{PLACE}/queues.db"

celery = Celery("fleet", broker="aztask://", backend=os.environ["BACKEND"])
celery.conf.update(
    broker_transport_options={"broker": ADDRESS, "lease": LEASE},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=2,
    worker_proc_alive_timeout=30,
    broker_connection_retry_on_startup=True,
)
app = App(
    "fleet",
    broker=ADDRESS,
    results=os.environ["RESULTS"],
    default_queue="celery",
    serializer="json",
    retry=RetryPolicy(max_retries=20, delay=0.1),
    lease=float(LEASE),
    max_deliveries=50,
)


@celery.task(name="fleet.work")
def work(number: int) -> int:
    """Note that a task ran."""
    note("work", number)
    return number


@celery.task(name="fleet.flaky", bind=True, max_retries=20)
def flaky(self: Any, number: int, failures: int) -> int:
    """Fail at the first runs, then note that it ran."""
    if self.request.retries < failures:
        raise self.retry(countdown=0.1)
    note("flaky", number)
    return number


@celery.task(name="fleet.step")
def step(value: int, number: int) -> int:
    """One step of a chain."""
    note("step", number, value)
    return value + 1


@celery.task(name="fleet.total")
def total(values: list[int], number: int) -> int:
    """The body of a chord."""
    note("total", number, sum(values))
    return sum(values)


for each in (work, step, total):
    app.task(name=each.name)(each.run)


@app.task_with_context(name="fleet.flaky")
def flaky_here(context: Context, number: int, failures: int) -> int:
    """`flaky` as aztask writes it."""
    if context.resubmit_count < failures:
        raise Retry(delay=0.1)
    note("flaky", number)
    return number
