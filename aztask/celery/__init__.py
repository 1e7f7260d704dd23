"""Everything about Celery: a transport, a result backend, what messages embed, and moving here.

``app.conf.beat_scheduler = "aztask.celery:Scheduler"`` names `aztask.operate.celerybeat.Scheduler`.
"""

from __future__ import annotations

from typing import Any

from aztask.support.late import late


def __getattr__(name: str) -> Any:
    """The Scheduler: imported when beat asks for it, because Kombu's users may lack Celery."""
    if name == "Scheduler":
        return late("aztask.operate.celerybeat", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
