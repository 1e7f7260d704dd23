"""The app that `local.py` measures."""

import os
import time

from aztask import App

app = App(
    "bench",
    broker=os.environ.get("BENCH_BROKER", "local://"),
    results=os.environ.get("BENCH_BROKER", "local://"),
)


@app.task
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task
def now() -> float:
    """Return the time at which it ran."""
    return time.time()
