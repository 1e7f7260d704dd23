"""The app of a worker: ``aztask -A aztask.django.worker:ALIAS worker``, ALIAS as in ``TASKS``.

``manage.py aztask_worker`` starts such a worker. Every other command of aztask takes the same name,
for example ``aztask -A aztask.django.worker:default dlq list``. DJANGO_SETTINGS_MODULE names the
settings.
"""

from __future__ import annotations

import django

from aztask.app import App
from aztask.app.loading import REASON_CHARACTERS, AppNotLoaded
from aztask.django.api import task_backends
from aztask.django.backend import AztaskBackend
from aztask.errors import ConfigurationError
from aztask.support.display import safe_str

django.setup()


def __getattr__(alias: str) -> App:
    """The App of the backend with this alias, with its tasks imported.

    Raises AppNotLoaded if a module with tasks cannot be imported, whatever it raises.
    """
    if alias.startswith("__") or alias not in task_backends.settings:
        raise AttributeError(alias)
    backend = task_backends[alias]
    if not isinstance(backend, AztaskBackend):
        raise AttributeError(alias)
    try:
        backend.tasks.load()
    except ConfigurationError:
        raise
    except Exception as error:
        text = safe_str(error, REASON_CHARACTERS)
        raise AppNotLoaded(
            f"the tasks of backend {alias!r} cannot be imported: {type(error).__name__}: {text}"
        ) from error
    return backend.app
