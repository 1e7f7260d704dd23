"""The app that `servicebus.py` measures: no result store, no events."""

import os
import time
from pathlib import Path

from aztask import App

app = App("bench", broker=os.environ["BENCH_BROKER"])


@app.task
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task
def now(path: str) -> None:
    """Write the time at which it ran to a file."""
    with Path(path).open("a") as file:
        file.write(f"{time.time():.6f}\n")
