"""A flow that waits, calls and begins anew, written so that two releases of aztask import it."""

from __future__ import annotations

import os
import time
from typing import Any

import aztask
from aztask import App

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")

app = App(
    "shop",
    broker=os.environ["FLEET_BROKER"],
    results=os.environ["FLEET_RESULTS"],
    unknown_task_grace=100.0,
)


def note(*words: object) -> None:
    """Append one line to the file of what ran, with the kind of this worker."""
    line = " ".join([os.environ.get("KIND", "sender"), *map(str, words)]) + "\n"
    file = os.open(f"{os.environ['PLACE']}/notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


@app.task(name="child")
def child(name: str) -> str:
    note("child", name)
    time.sleep(0.05)
    return name


def act(context: Any, key: str, left: int) -> int:
    note("act", key, left, context.step_key)
    return left


@app.task_with_context(name="flow")
def flow(context: Any, key: str, left: int, made: list[Any]) -> list[Any]:
    """In each round an action, a child, and a signal."""
    note("flow", key)
    made = [*made, context.step("act", act, context, key, left)]
    parcel = context.start(child, f"{key}-{left}")
    found, value = context.wait_any("never", parcel, timeout=600)
    made.append([found is parcel, value])
    made.append(context.wait_for("go", timeout=600))
    if left > 1:
        context.continue_with(key, left - 1, made)
    return made
