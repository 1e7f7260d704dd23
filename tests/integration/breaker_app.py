"""A task with a circuit breaker. It fails while a file exists, and writes `ledger_app`'s ledger."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ledger_app import note

from aztask import App, CircuitBreaker, RetryPolicy
from aztask.limits import breakers
from aztask.worker import breaking

breakers.PROBE_SECONDS = breaking.PROBE_SECONDS = 8.0  # type: ignore[misc]

app = App(
    "breaker",
    broker=os.environ.get("LEDGER_BROKER", "local://"),
    results=os.environ.get("LEDGER_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=1000, delay=0.2, backoff=1.0, jitter=False, max_snoozes=0),
)


@app.task(breaker=CircuitBreaker(share=0.8, window=10, minimum=6, pause=2, longest=4))
def call(key: str) -> str:
    """Hang while there is a file "hang", fail while there is a file "down"."""
    note("start", key)
    while Path("hang").exists():
        time.sleep(0.05)
    if Path("down").exists():
        raise ConnectionError("the partner is down")
    note("end", key)
    return key


@app.task
def other(key: str) -> str:
    note("start", key)
    return key
