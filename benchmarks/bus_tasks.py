"""The app that `servicebus.py` measures: no result store, no events."""

import os
import time
from pathlib import Path

from aztask import App

app = App("bench", broker=os.environ["BENCH_BROKER"])


@app.task
def noop() -> None:
    """Nothing at all."""


@app.task
def now(path: str) -> None:
    """When it ran, into a file."""
    with Path(path).open("a") as file:
        file.write(f"{time.time():.6f}\n")
