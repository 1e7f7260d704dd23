"""Django's task framework under one set of names: ``django.tasks``, or its backport.

Django 6 has ``django.tasks``. For Django 5.2, the package django-tasks brings the same as
``django_tasks``; the names of two exceptions differ.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

from aztask.hooks import Sending
from aztask.stores.records.base import NOTE_BYTES
from aztask.support.late import install_command

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:
    try:
        from django_tasks import task_backends
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
        from django_tasks.exceptions import InvalidTaskError as InvalidTask
        from django_tasks.exceptions import TaskResultDoesNotExist
        from django_tasks.signals import task_enqueued, task_finished, task_started
        from django_tasks.utils import normalize_json
    except ImportError as error:
        raise ImproperlyConfigured(
            "aztask.django needs Django 6, or Django 5.2 with the package django-tasks "
            f"({error}); install it with: {install_command('django')}, and for Django 5.2 "
            "pip install django-tasks"
        ) from error

__all__ = [
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "normalize_json",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]


# What a sender stores with a task so that Django can show it: its arguments and its times.
#
# The result store keeps it as the note of the first run
# (`aztask.stores.records.base.RunRecord.note`), and the message carries the times in two headers
# for the worker.


ENQUEUED_AT: Final = "django-enqueued-at"
RUN_AFTER: Final = "django-run-after"


@dataclass(frozen=True, slots=True)
class Call:
    """One enqueued task.

    * `queue`: the queue's name; "" if unknown.
    * `enqueued_at`, `run_after`: UTC epoch seconds; None if unknown or not given.
    * `args`, `kwargs`: JSON values. Empty if they were too long to be kept.
    """

    queue: str = ""
    enqueued_at: float | None = None
    run_after: float | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def note(self) -> bytes:
        """This call for the result store, without its arguments if they are too long."""
        known = {"queue": self.queue, "enqueued_at": self.enqueued_at, "run_after": self.run_after}
        data = json.dumps({**known, "args": self.args, "kwargs": self.kwargs}).encode()
        return data if len(data) <= NOTE_BYTES else json.dumps(known).encode()

    def headers(self) -> dict[str, float]:
        """The headers of the message."""
        times = {ENQUEUED_AT: self.enqueued_at, RUN_AFTER: self.run_after}
        return {name: value for name, value in times.items() if value is not None}


def noted(data: bytes | None) -> Call:
    """The call in a note. An empty one if there is no note, or if it cannot be read."""
    try:
        values = json.loads(data) if data else {}
    except ValueError:
        return Call()
    if not isinstance(values, dict):
        return Call()
    queue, args, kwargs = values.get("queue"), values.get("args"), values.get("kwargs")
    return Call(
        queue if isinstance(queue, str) else "",
        _number(values.get("enqueued_at")),
        _number(values.get("run_after")),
        args if isinstance(args, list) else [],
        kwargs if isinstance(kwargs, dict) else {},
    )


def times_in(headers: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """When a message was enqueued, and when it may run, from its headers."""
    return _number(headers.get(ENQUEUED_AT)), _number(headers.get(RUN_AFTER))


def at(seconds: float | None) -> datetime | None:
    """UTC epoch seconds as Django's settings have times: aware, or naive without USE_TZ."""
    if seconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def aware(moment: datetime) -> datetime:
    """A time with its time zone: Django's current one if it has none (USE_TZ = False)."""
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


_sending: ContextVar[Call | None] = ContextVar("aztask-django-call", default=None)


@contextmanager
def sending(call: Call) -> Iterator[None]:
    """What is sent in the block is this call."""
    token = _sending.set(call)
    try:
        yield
    finally:
        _sending.reset(token)


def attach(send: Sending) -> Generator[None, Any, Any]:
    """The ``around_send`` hook of a backend's app: adds the call to the message and its row."""
    call = _sending.get()
    if call is not None:
        send.headers.update(call.headers())
        send.note = call.note()
    yield


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
