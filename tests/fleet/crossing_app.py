"""Workflows that cross between Celery and aztask workers, and tasks with keys, for two releases.

The queue ``celery`` has workers of both kinds. Celery neither signs nor decrypts, so what is secret
has a queue, a result store and an app of its own, ``secret``, whose messages Celery never gets.
"""

from __future__ import annotations

import os
import time

from celery import Celery
from fleetprocesses import note

import aztask
from aztask import App, Context, Retry, RetryPolicy, chain, group
from aztask.celery import transport

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")
transport.register()
PLACE = os.environ["PLACE"]
LEASE = float(os.environ["LEASE"])
ADDRESS = os.environ["FLEET_BROKER"]
KEYS = ["a key that every program of this fleet has"]
OPEN_RESULTS, SECRET_RESULTS = f"local://{PLACE}/results.db", f"local://{PLACE}/secret.db"
HIDDEN = "a-number-that-no-file-may-show"

celery = Celery("fleet", broker="aztask://", backend=f"aztask+{OPEN_RESULTS}")
celery.conf.update(
    broker_transport_options={"broker": ADDRESS, "lease": LEASE},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=2,
    worker_proc_alive_timeout=30,
    broker_connection_retry_on_startup=True,
)
common = {
    "broker": ADDRESS,
    "retry": RetryPolicy(max_retries=20, delay=0.1),
    "lease": LEASE,
    "max_deliveries": 50,
}
app = App("fleet", results=OPEN_RESULTS, default_queue="celery", serializer="json", **common)
signed = App(
    "signed",
    default_queue="celery",
    serializer="json",
    signing_keys=KEYS,
    **common,
)
secret = App(
    "secret",
    results=SECRET_RESULTS,
    default_queue="secret",
    signing_keys=KEYS,
    encryption_keys=[KEYS[0]],
    encrypt=True,
    id_key=KEYS[0],
    **common,
)


@celery.task(name="fleet.step")
def step(value: int, number: int) -> int:
    """One step of a chain."""
    time.sleep(0.2)
    note("step", number, value)
    return value + 1


@celery.task(name="fleet.total")
def total(values: list[int], number: int) -> int:
    """The body of a chord."""
    note("total", number, sum(values))
    return sum(values)


@celery.task(name="fleet.plain")
def plain(number: int) -> None:
    """A task that is sent with a signature."""
    note("plain", number)


for each in (step, total, plain):
    app.task(name=each.name)(each.run)
plain_here = signed.task(name="fleet.plain")(plain.run)


@secret.task_with_context(name="secret.first")
def first(context: Context, number: int, word: str) -> str:
    """It fails once, and hands on what no file may show."""
    if number % 3 == 0 and context.resubmit_count < 1:
        raise Retry(delay=0.1)
    time.sleep(0.2)
    note("first", number)
    return word


@secret.task(name="secret.second")
def second(word: str, number: int) -> int:
    """The task behind `first`."""
    assert word == HIDDEN, word
    note("second", number)
    return number


@secret.task(name="secret.last")
def last(values: list[int], number: int) -> None:
    """The task behind a group."""
    note("last", number, sum(values))


def secret_workflow(number: int) -> None:
    """Two chains, and a task that waits for both."""
    parts = [first.s(number, HIDDEN) | second.s(number) for _ in range(2)]
    chain(group(*parts), last.s(number)).delay(workflow_id=f"secret-{number}")
