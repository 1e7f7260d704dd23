"""Tasks with limits, for the integration tests. They write the ledger of `ledger_app`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ledger_app import note

from aztask import App, Context, RetryPolicy

app = App(
    "limits",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=3, delay=0.1, backoff=1.0, jitter=False, max_snoozes=0),
)
app.limit("ten", rate="10/s")
app.limit("fifty", rate="50/s")
app.limit("five", concurrency=5)
app.limit("tenant", rate="2/s", key=lambda tenant, *_: tenant)
app.limit("tokens", rate="1200/m", burst=600, cost=lambda cost, **_: cost)
app.limit("customer", concurrency=2, key=lambda customer, *_: customer)


@app.task(limits=["customer"])
def serve(customer: str, key: str, seconds: float = 0.0) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task(limits=["ten"])
def ten(key: str) -> str:
    note("start", key)
    return key


@app.task(limits=["fifty"])
def fifty(key: str) -> str:
    note("start", key)
    return key


@app.task(limits=["tenant"])
def tenant(name: str, key: str) -> str:
    note("start", key)
    return key


@app.task(limits=["fifty"], delivery="at-most-once")
def once(key: str) -> str:
    note("start", key)
    return key


@app.task
def free(key: str) -> str:
    note("start", key)
    return key


@app.task(limits=["five"])
def five(key: str, seconds: float) -> str:
    note("start", key)
    try:
        time.sleep(seconds)
    finally:
        note("end", key)
    return key


@app.task(limits=["five"])
def five_until(key: str, path: str) -> str:
    """Runs until there is this file."""
    note("start", key)
    while not Path(path).exists():
        time.sleep(0.05)
    note("end", key)
    return key


@app.task_with_context(limits=["tokens"])
def spend(context: Context, key: str, cost: int, used: int | None, seconds: float = 0.0) -> str:
    """Costs `cost`, and says then that it has used `used`."""
    note("start", key)
    if used is not None:
        context.spent("tokens", used)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task(limits=["tokens", "five"])
def spend_and_hold(key: str, cost: int, seconds: float) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key
