"""Tasks of one name for Celery and for aztask: what they do is noted in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery

from aztask import App, RetryPolicy, transport

transport.register()
PLACE = os.environ["PLACE"]
ADDRESS = os.environ.get("BROKER", f"local://{PLACE}/queues.db")
LEASE = float(os.environ.get("LEASE", "3"))
QUICK = RetryPolicy(max_retries=2, delay=0.05, jitter=False)

celery = Celery("embedded", broker="aztask://", backend=os.environ.get("BACKEND"))
celery.conf.update(
    broker_transport_options={"broker": ADDRESS, "lease": LEASE},
    task_acks_late=True,
    worker_prefetch_multiplier=2,
    worker_proc_alive_timeout=30,
    result_chord_retry_interval=0.2,
    broker_connection_retry_on_startup=True,
)
app = App(
    "embedded",
    broker=ADDRESS,
    results=os.environ["RESULTS"],
    default_queue="celery",
    serializer="json",
    retry=RetryPolicy(max_retries=0),
    lease=LEASE,
    unknown_task_grace=60,
)
KIND = os.environ.get("KIND", "aztask")


def note(*words: object) -> None:
    """Append a line, with the kind of worker that runs this."""
    with (Path(PLACE) / "notes").open("a") as file:
        file.write(" ".join([KIND, *map(str, words)]) + "\n")


def both(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a function under one name with Celery and with aztask."""

    def register(function: Callable[..., Any]) -> Any:
        name = f"embedded.{function.__name__}"
        app.task(name=name, **options)(function)
        return celery.task(name=name)(function)

    return register


@both()
def add(left: int, right: int) -> int:
    """Add two numbers."""
    note("add", left, right)
    return left + right


@both()
def total(numbers: list[int]) -> int:
    """Add up many numbers."""
    note("total", *numbers)
    return sum(numbers)


@both()
def fail(*args: Any) -> None:
    """Fail whatever the arguments are."""
    note("fail", *args)
    raise ValueError(f"no {args}")


@both()
def failed_id(task_id: str) -> None:
    """Note a failure: an errback with one parameter."""
    note("failed_id", task_id)


@both()
def failed_request(request: Any, error: Any, traceback: Any) -> None:
    """Note a failure: an errback with three parameters."""
    note("failed_request", request["id"] if isinstance(request, dict) else request.id, error)


@both()
def slow(number: int, seconds: float) -> int:
    """Take some time."""
    time.sleep(seconds)
    note("slow", number)
    return number


@celery.task(name="embedded.only_celery")
def only_celery(value: int) -> int:
    """Double a number; aztask does not know this task."""
    note("only_celery", value)
    return 2 * value


@app.task(name="embedded.only_aztask")
def only_aztask(value: int) -> int:
    """Negate a number; Celery does not know this task."""
    note("only_aztask", value)
    return -value
