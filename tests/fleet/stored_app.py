"""An app with signing keys, whose stored messages two releases send for each other.

As a program it does one step: ``store NAME`` stores what waits for its turn, ``trigger NAME`` sends
an occurrence of the schedule that was stored, ``turn NAME`` does what a worker does for schedules.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aztask import App, chain

FOLDER = Path(os.environ["FOLDER"])
app = App(
    "stored",
    broker=f"local://{FOLDER}/queues.db",
    results=f"local://{FOLDER}/results.db",
    signing_keys=["a key that both releases have, 32 bytes"],
)


@app.task
def work(name: str) -> None:
    with (FOLDER / "notes").open("a") as file:
        file.write(f"{name}\n")


@app.task(debounce=0.2, unique="arguments")
def late(name: str) -> None:
    with (FOLDER / "notes").open("a") as file:
        file.write(f"{name}\n")


def store(name: str) -> None:
    """Store a workflow's second step, a schedule and a debounced call."""
    steps = [work.si(f"{name}-approve"), work.si(f"{name}-ship")]
    chain(*steps).delay(workflow_id=f"{name}-order")
    app.schedules.create(f"{name}-nightly", work.si(f"{name}-night"), every=86400.0)
    late.delay(f"{name}-late")


if __name__ == "__main__":
    if sys.argv[1] == "store":
        store(sys.argv[2])
    elif sys.argv[1] == "turn":
        app.schedules.runner(sys.argv[2]).turn()
    else:
        app.schedules.trigger(f"{sys.argv[2]}-nightly")
    app.close()
