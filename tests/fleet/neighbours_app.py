"""Tasks, flows and a chain, written so that two neighbouring releases of aztask import them."""

from __future__ import annotations

import os
from typing import Any

from fleetprocesses import note

import aztask
from aztask import App, Retry

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")

app = App(
    "shop",
    broker=os.environ["FLEET_BROKER"],
    results=os.environ["FLEET_RESULTS"],
    events=f"{os.environ['PLACE']}/events",
    lease=float(os.environ["FLEET_LEASE"]),
    max_deliveries=50,
)


@app.task(name="work")
def work(number: int) -> int:
    note("work", number)
    return 2 * number


@app.task_with_context(name="flaky")
def flaky(context: Any, number: int, failures: int) -> int:
    """Fail at the first runs."""
    if context.resubmit_count < failures:
        raise Retry(delay=0.2)
    note("flaky", number)
    return number


def act(key: str) -> str:
    note("act", key)
    return f"acted for {key}"


@app.task_with_context(name="flow")
def flow(context: Any, key: str) -> list[Any]:
    """A recorded step, a sleep, a signal, and another task: it parks three times."""
    note("flow", key)
    done = context.step("act", act, key)
    context.sleep(1.0)
    number = context.wait_for("go", timeout=600)
    return [done, number, context.call(work, number)]
