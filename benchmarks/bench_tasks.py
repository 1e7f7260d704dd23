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
    """Nothing at all."""


@app.task
def now() -> float:
    """When it ran."""
    return time.time()
