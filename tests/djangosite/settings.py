"""The settings; a test's environment names the folder, the queues and the results."""

import os
from pathlib import Path

from aztask import RetryPolicy

ONCE = RetryPolicy(max_retries=0)
FOLDER = Path(os.environ.get("DJANGOSITE_FOLDER", ".")).resolve()
SECRET_KEY = "for tests"
USE_TZ = True
TIME_ZONE = "UTC"  # Django sets it for the whole process
INSTALLED_APPS = ["djangosite", "aztask.django"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FOLDER / "site.sqlite3",
        "OPTIONS": {"timeout": 20},
        "CONN_MAX_AGE": int(os.environ.get("DJANGOSITE_CONN_MAX_AGE", "0")),
    }
}
MODULES = os.environ.get("DJANGOSITE_MODULES")
TASKS = {
    "default": {
        "BACKEND": "aztask.django.backend.AztaskBackend",
        "QUEUES": ["default", "queue_1"],
        "OPTIONS": {
            "broker": os.environ.get("DJANGOSITE_BROKER", f"local://{FOLDER}/queues.db"),
            "results": os.environ.get("DJANGOSITE_RESULTS", f"local://{FOLDER}/queues.db"),
            "modules": MODULES.split(",") if MODULES else None,
            "tasks": {"djangosite.tasks.limited": {"soft_time_limit": 0.5, "retry": ONCE}},
        },
    }
}
