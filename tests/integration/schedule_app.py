"""An app whose schedule is due each second. Every run leaves a line in `ledger_app`'s ledger.

With SCHEDULE_CLOCK, the store's time of schedules is what a file says, see `clockfile`; with
SCHEDULE_SKEW, this process's wall clock is wrong by so many seconds.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

SKEW = float(os.environ.get("SCHEDULE_SKEW", "0"))
if SKEW:
    right = time.time
    time.time = lambda: right() + SKEW

import clockfile  # noqa: E402  # the clock is set before anything reads it
from ledger_app import app, note  # noqa: E402

from aztask import Context  # noqa: E402
from aztask.schedules import engine, runner  # noqa: E402
from aztask.stores.records.local.schedules import LocalSchedules  # noqa: E402
from aztask.stores.records.tables.schedules import TablesSchedules  # noqa: E402

runner.RESEND_SECONDS = float(os.environ.get("SCHEDULE_RESEND", "2"))
least, most = json.loads(os.environ.get("SCHEDULE_STAGGER", "[0.5, 2.0]"))
runner.STAGGER = (least, 0.75 * most)
runner.REMOTE_STAGGER = (least, most)
runner.REMOTE_LOOK_SECONDS = 2.0
runner.REMOTE_START_SECONDS = 0.5
engine.KEPT = 100_000  # type: ignore[misc]  # the tests look at all of them

if "SCHEDULE_CLOCK" in os.environ:
    runner.LONGEST_PAUSE = 0.05  # type: ignore[misc]
    clockfile.inject(os.environ["SCHEDULE_CLOCK"], LocalSchedules, TablesSchedules)


@app.task_with_context
def tick(context: Context) -> float:
    assert context.scheduled_at is not None
    at = context.scheduled_at.timestamp()
    note("end", f"{at:.0f}")
    return at


@app.task_with_context
def begin(context: Context) -> str:
    assert context.scheduled_at is not None
    at = f"{context.scheduled_at.timestamp():.0f}"
    note("start", at)
    return at


@app.task_with_context
def finish(context: Context, at: str) -> str:
    """It takes longer than the time between two occurrences."""
    assert context.scheduled_at is not None
    assert f"{context.scheduled_at.timestamp():.0f}" == at
    time.sleep(1.5)
    note("end", at)
    return at


if "SCHEDULE_OVERLAP" in os.environ:
    overlap: Any = os.environ["SCHEDULE_OVERLAP"]
    app.schedule("flow", begin.s() | finish.s(), every=1, overlap=overlap)

DECLARED = json.loads(
    os.environ.get("SCHEDULES", '{"tick": {"every": 1, "missed": "all", "max_missed": 1000}}')
)
for name, options in DECLARED.items():
    app.schedule(name, tick.s(), **options)
