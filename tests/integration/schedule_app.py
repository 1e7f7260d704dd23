"""An app whose schedule is due each second. Every run leaves a line in `ledger_app`'s ledger."""

from __future__ import annotations

import os

from ledger_app import app, note

from aztask import Context
from aztask.schedules import runner

runner.RESEND_SECONDS = float(os.environ.get("SCHEDULE_RESEND", "2"))
runner.STAGGER = (0.5, 1.5)
runner.REMOTE_STAGGER = (0.5, 2.0)
runner.REMOTE_LOOK_SECONDS = 2.0
runner.REMOTE_START_SECONDS = 0.5


@app.task_with_context
def tick(context: Context) -> float:
    assert context.scheduled_at is not None
    at = context.scheduled_at.timestamp()
    note("end", f"{at:.0f}")
    return at


app.schedule("tick", tick.s(), every=1, missed="all", max_missed=1000)
