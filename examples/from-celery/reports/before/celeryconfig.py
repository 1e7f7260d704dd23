"""Settings in a module of their own."""

import os

from aztask.celery import transport

transport.register()

broker_url = "aztask://"
broker_transport_options = {"broker": os.environ.get("QUEUES", "local://"), "lease": 30}
timezone = "Europe/Berlin"
task_ignore_result = True
task_default_queue = "reports"
task_serializer = "json"
task_soft_time_limit = 50
task_time_limit = 60
beat_schedule_filename = os.environ.get("SCHEDULE", "celerybeat-schedule")
