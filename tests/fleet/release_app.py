"""Tasks of one name for Celery and for aztask, written so that two releases of aztask run them."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from fleetprocesses import note

import aztask
from aztask import App, Context, Retry, RetryPolicy, transport

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")
transport.register()
ADDRESS = os.environ["FLEET_BROKER"]
LEASE = 5

celery = Celery("release", broker="aztask://")
celery.conf.update(
    broker_transport_options={"broker": ADDRESS, "lease": LEASE, "declare": False},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=2,
    worker_proc_alive_timeout=30,
    broker_connection_retry_on_startup=True,
)
app = App(
    "release",
    broker=ADDRESS,
    default_queue="celery",
    serializer="json",
    retry=RetryPolicy(max_retries=20, delay=0.1),
    lease=float(LEASE),
    max_deliveries=50,
)


@celery.task(name="release.work")
def work(number: int) -> None:
    """Note that a task ran."""
    note("work", number)


@celery.task(name="release.flaky", bind=True, max_retries=20)
def flaky(self: Any, number: int, failures: int) -> None:
    """Fail at the first runs, then note that it ran."""
    if self.request.retries < failures:
        raise self.retry(countdown=0.1)
    note("flaky", number)


work_here = app.task(name="release.work")(work.run)


@app.task_with_context(name="release.flaky")
def flaky_here(context: Context, number: int, failures: int) -> None:
    """`flaky` as aztask writes it."""
    if context.resubmit_count < failures:
        raise Retry(delay=0.1)
    note("flaky", number)
