"""The app: routes, time limits, and late acknowledgement."""

import os

from celery import Celery

from aztask.celery import transport

transport.register()
app = Celery("proj", include=["proj.tasks"])
app.conf.update(
    broker_url="aztask://",
    broker_transport_options={"broker": os.environ.get("QUEUES", "local://"), "lease": 30},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_routes={"proj.tasks.fetch": {"queue": "feeds"}},
    task_time_limit=60,
    worker_prefetch_multiplier=1,
)
