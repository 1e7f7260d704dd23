"""The two tasks on aztask, without results."""

import os
import sys

from marks import leave

from aztask import App

app = App("bench", broker=os.environ["BENCH_CONNECTION"])


@app.task
def noop() -> None:
    """Do nothing, to measure only the overhead."""


@app.task
def mark(key: str, seconds: float = 0.0) -> None:
    """Leave a mark in the file of marks."""
    leave(key, seconds)


def send(count: int) -> None:
    """Send so many no-ops, one by one."""
    for _ in range(count):
        noop.delay()


def marks(prefix: str, count: int, seconds: float) -> None:
    """Send so many tasks that leave a mark."""
    mark.map([(f"{prefix}{number}", seconds) for number in range(count)])


if __name__ == "__main__":
    sys.exit("import it")
