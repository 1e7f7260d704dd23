"""Celery's beat without a leader: run two or more, on as many machines as there are."""

import os

from celery import Celery, Task
from celery.schedules import crontab

from aztask.celery import transport

transport.register()

app = Celery("beats", broker="aztask://", backend="aztask://")
app.conf.update(
    broker_transport_options={"broker": os.environ.get("QUEUES", "local://")},
    result_backend_transport_options={"results": os.environ.get("RESULTS", "local://")},
    beat_scheduler="aztask.celery:Scheduler",
    timezone="Europe/Berlin",
    beat_schedule={
        "refresh": {"task": "beats.refresh", "schedule": 2.0, "args": ("totals",)},
        "nightly": {
            "task": "beats.refresh",
            "schedule": crontab(hour=2, minute=0),
            "args": ("all",),
        },
    },
)


@app.task(name="beats.refresh", bind=True)
def refresh(self: Task, what: str) -> None:
    """Refresh one table. The id says which time it is for."""
    print(f"{self.request.id}: {what} refreshed", flush=True)
