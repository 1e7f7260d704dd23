"""An app with schedules that are due each second, for workers of this release and the one before.

APP names it, BROKER and RESULTS are its addresses, and every run leaves a line in NOTES. Looks and
staggers are short, as `aztask.schedules.runner` has them in both releases.
"""

from __future__ import annotations

import os

from aztask import App, Context
from aztask.schedules import runner

runner.LOOK_SECONDS = 1.0  # type: ignore[misc]
runner.REMOTE_LOOK_SECONDS = 1.0
runner.REMOTE_START_SECONDS = 0.5
runner.STAGGER = (0.5, 1.5)
runner.REMOTE_STAGGER = (0.5, 1.5)
runner.RESEND_SECONDS = 2.0

app = App(os.environ["APP"], broker=os.environ["BROKER"], results=os.environ["RESULTS"])


@app.task_with_context
def tick(context: Context) -> None:
    assert context.scheduled_at is not None
    at = context.scheduled_at.timestamp()
    line = f"{os.environ['APP']} {context.schedule} {at:.0f} {context.message.id}\n"
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


for name in ("tick", "shared.tick"):
    app.schedule(name, tick.s(), every=1, missed="all", max_missed=1000)
