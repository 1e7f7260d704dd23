"""The tasks that run amid a chaos, see `mixture`. They write the ledger of `ledger_app`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ledger_app import app, double, note

from aztask import Context, RetryPolicy, Snooze, chord
from aztask.uniqueness import engine
from aztask.workflows.graphs import Graph

engine.UNSENT_SECONDS = 1.0

AGAIN = RetryPolicy(max_retries=20, delay=0.05, backoff=1.0, jitter=False, max_snoozes=100_000)
LARGE = 20_000
MEMBERS = 3
STEP = 0.02


@app.task(retry=AGAIN)
def careful(key: str, seconds: float, cleaning: float) -> str:
    """Clean up slowly if it is interrupted, for `cleaning` seconds."""
    note("start", key)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(STEP)
        note("end", key)
    except BaseException:
        note("told", key)
        time.sleep(cleaning)
        note("cleaned", key)
        raise
    return key


@app.task(retry=AGAIN)
async def careful_later(key: str, seconds: float, cleaning: float) -> str:
    note("start", key)
    try:
        await asyncio.sleep(seconds)
        note("end", key)
    except BaseException:
        note("told", key)
        await asyncio.sleep(cleaning)
        note("cleaned", key)
        raise
    return key


@app.task(unique=lambda key, number, data: key, debounce=1.0, retry=AGAIN)
def weighed(key: str, number: int, data: bytes) -> list[int]:
    """A debounced call with a large argument."""
    note("end", f"{key}-{number}-{len(data)}")
    return [number, len(data)]


@app.task_with_context(retry=AGAIN)
def gate(context: Context, path: str) -> str:
    """Wait until a file exists."""
    if not Path(path).exists():
        raise Snooze(0.5)
    return "open"


@app.task(retry=AGAIN)
def sizes(values: list[bytes | str]) -> list[int | str]:
    return [len(each) if isinstance(each, bytes) else each for each in values]


def long_open(path: str) -> Graph:
    """A chord with large arguments and results that ends only after the file exists."""
    members = [double.s(f"large-{number}", b"x" * LARGE) for number in range(MEMBERS)]
    return chord([*members, gate.s(path)], sizes.s())
