"""Settings of the shop. Queues and results come from the environment, else from files here."""

import os
from pathlib import Path

from aztask import RetryPolicy

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = "an example has no secrets"  # noqa: S105
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "webshop.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "aztask.django",
    "orders",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "shop.sqlite3",
        "OPTIONS": {"timeout": 20},
    }
}
QUEUES = f"local://{BASE_DIR}/tasks.db"
TASKS = {
    "default": {
        "BACKEND": "aztask.django.backend.AztaskBackend",
        "QUEUES": ["default"],
        "OPTIONS": {
            "broker": os.environ.get("AZTASK_BROKER", QUEUES),
            "results": os.environ.get("AZTASK_RESULTS", QUEUES),
            "retry": RetryPolicy(max_retries=1, delay=0.1),
            "modules": ["orders.tasks"],
            "enqueue_on_commit": True,
        },
    }
}
