"""The app of a worker: ``aztask -A aztask.django.worker:ALIAS worker``, ALIAS as in ``TASKS``.

``manage.py aztask_worker`` starts such a worker. Every other command of aztask takes the same name,
for example ``aztask -A aztask.django.worker:default dlq list``. DJANGO_SETTINGS_MODULE names the
settings.
"""

from __future__ import annotations

import django

from aztask.app import App
from aztask.django.api import task_backends
from aztask.django.backend import AztaskBackend

django.setup()


def __getattr__(alias: str) -> App:
    """The App of the backend with this alias, with its tasks imported."""
    if alias.startswith("__") or alias not in task_backends.settings:
        raise AttributeError(alias)
    backend = task_backends[alias]
    if not isinstance(backend, AztaskBackend):
        raise AttributeError(alias)
    backend.tasks.load()
    return backend.app
