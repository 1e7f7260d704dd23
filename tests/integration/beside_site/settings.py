"""The site's settings; what concerns Celery begins with ``CELERY_``."""

from __future__ import annotations

import json
import os

SECRET_KEY = "beside"
INSTALLED_APPS = ["beside_site", "django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["SITE"],
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}
USE_TZ = True
CELERY_BROKER_URL = os.environ["BROKER_URL"]
CELERY_BROKER_TRANSPORT_OPTIONS = json.loads(os.environ["OPTIONS"])
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_RESULT_BACKEND = os.environ["BACKEND_URL"]
CELERY_RESULT_BACKEND_TRANSPORT_OPTIONS = json.loads(os.environ["RESULT_OPTIONS"])
CELERY_TASK_DEFAULT_QUEUE = f"{os.environ['QUEUE']}-site"
CELERY_TASK_ACKS_LATE = True
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = 1
