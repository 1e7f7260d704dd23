"""Tasks of sessions, for the integration tests; they write the ledger of `ledger_app`.

A line's key is ``SESSION/NUMBER``.
"""

from __future__ import annotations

import os
import time

from ledger_app import note

from aztask import App, Context, Reject, RetryPolicy

app = App(
    "sessions",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=3, delay=0.2, backoff=1.0, jitter=False),
    unknown_task_grace=float(os.environ.get("LEDGER_GRACE", "300")),
)
app.queue("orders", sessions=True, lease=float(os.environ.get("LEDGER_LEASE", "2")))


def key_of(context: Context, number: int) -> str:
    assert context.session is not None
    return f"{context.session.id}/{number}"


@app.task_with_context(queue="orders")
def step(context: Context, number: int, seconds: float = 0.0) -> int:
    note("start", key_of(context, number))
    if seconds:
        time.sleep(seconds)
    note("end", key_of(context, number))
    return number


@app.task_with_context(queue="orders", retry=RetryPolicy(delay=1.0, backoff=1.0, jitter=False))
def shaky(context: Context, number: int, failures: int) -> int:
    note("start", key_of(context, number))
    if context.resubmit_count < failures:
        raise ValueError(f"failure {context.resubmit_count}")
    note("end", key_of(context, number))
    return context.resubmit_count


@app.task_with_context(queue="orders", retry=RetryPolicy(max_retries=2, delay=0.1, jitter=False))
def quick(context: Context, number: int, failures: int) -> int:
    return shaky.function(context, number, failures)


@app.task_with_context(queue="orders", retry_strategy="lease-timeout")
def lapsing(context: Context, number: int, failures: int) -> int:
    return shaky.function(context, number, failures)


@app.task_with_context(queue="orders")
def rejected(context: Context, number: int) -> None:
    note("start", key_of(context, number))
    raise Reject("no good")


@app.task_with_context(queue="orders")
def counted(context: Context, die: bool = False) -> list[int]:
    """How often the session has run this task, and where it died in between."""
    assert context.session is not None
    seen = [*(context.session.state or []), os.getpid()]
    context.session.state = seen
    if die and context.delivery_count == 1:
        os._exit(7)
    return seen
