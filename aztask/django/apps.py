"""The Django app ``aztask.django``, which brings the command ``manage.py aztask_worker``."""

from __future__ import annotations

from django.apps import AppConfig


class AztaskConfig(AppConfig):
    """For ``INSTALLED_APPS``. It has no models."""

    name = "aztask.django"
    label = "aztask"
    verbose_name = "aztask"
