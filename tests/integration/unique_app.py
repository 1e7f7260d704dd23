"""Unique tasks. Every run leaves lines in the ledger of `ledger_app`."""

from __future__ import annotations

import time

from ledger_app import app, note

from aztask import RetryPolicy
from aztask.uniqueness import engine

engine.UNSENT_SECONDS = 1.0

NEVER = RetryPolicy(max_retries=0)


@app.task(unique="arguments", retry=NEVER)
def single(key: str, seconds: float = 0.0) -> str:
    note("start", key)
    time.sleep(seconds)
    note("end", key)
    return key


@app.task(unique=lambda key, n: key, debounce=1.0, retry=NEVER)
def settled(key: str, n: int) -> int:
    note("start", f"{key}-{n}")
    return n


@app.task(unique="arguments", retry=NEVER)
def doomed(key: str) -> str:
    note("start", key)
    raise ValueError(f"{key} fails")
