"""The backend for Django's tasks: ``"BACKEND": "aztask.django.backend.AztaskBackend"``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.core import checks
from django.db import connections, transaction

from aztask.app import App
from aztask.config import read_environment
from aztask.django.api import (
    BaseTaskBackend,
    Call,
    InvalidTask,
    TaskResult,
    TaskResultStatus,
    at,
    aware,
    sending,
    task_enqueued,
)
from aztask.django.results import result_of
from aztask.django.running import wrap
from aztask.django.taskapp import TaskApp, task_app
from aztask.stores.connections import TEST_BROKER
from aztask.support.chance import new_id
from aztask.taskoptions import SendOptions


class AztaskBackend(BaseTaskBackend):
    """Sends Django's tasks to the queues of an `App`, and reads their results.

    `OPTIONS` are those of the App (``broker``, ``results``, ``retry``, ``lease`` ...) and those of
    `aztask.django.taskapp.BackendOptions`. ``QUEUES`` are names of queues.

    Priorities are refused, because the queue services have none: give urgent tasks a queue and a
    worker of their own.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = False

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        """Django calls it. Raises ConfigurationError if an option is wrong."""
        super().__init__(alias, params)
        self.tasks: TaskApp = task_app(alias, params, type(self), wrap)
        kept = self.tasks.options.app.get("results")
        self.supports_get_result = bool(
            kept or read_environment("AZTASK_RESULTS") or read_environment(TEST_BROKER)
        )

    @property
    def app(self) -> App:
        """The App, for inline mode in tests and for what Django's interface does not have."""
        return self.tasks.app

    def validate_task(self, task: Any) -> None:
        """Raise InvalidTask unless this backend can run the task. Makes the task known.

        Django calls it whenever a task is declared, changed with ``using()`` or enqueued.
        """
        super().validate_task(task)
        module = task.func.__module__
        if not self.tasks.options.allows(module):
            raise InvalidTask(
                f"Task {task.module_path} is in a module that backend {self.alias!r} does not "
                f"allow; add {module!r} to its option modules."
            )
        self.tasks.register(task)

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Send the task; with ``enqueue_on_commit``, when the current transaction commits.

        Raises InvalidTask, TypeError if an argument is not JSON, and what `App.send` raises.
        """
        result = self._ready(task, args, kwargs)
        if self.tasks.options.enqueue_on_commit:
            transaction.on_commit(partial(self._send, result), self.tasks.options.database)
        else:
            self._send(result)
        return result

    async def aenqueue(
        self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult:
        """`enqueue` for coroutines: it never blocks the event loop."""
        if self.tasks.options.enqueue_on_commit:  # the transaction is in Django's thread
            return await sync_to_async(self.enqueue, thread_sensitive=True)(task, args, kwargs)
        result = self._ready(task, args, kwargs)
        call, options = _call(result), _options(result)
        with sending(call):
            await self.app.asend(task.module_path, result.args, result.kwargs, **options)
        _note_sent(result, call)
        await task_enqueued.asend(sender=type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """The result of this id.

        Raises TaskResultDoesNotExist, NotImplementedError without a result store, and
        BrokerUnavailable if the store is unreachable.
        """
        return result_of(self.tasks, result_id)

    async def aget_result(self, result_id: str) -> TaskResult:
        """`get_result` for coroutines, in a thread that no database work waits for."""
        return await sync_to_async(self.get_result, thread_sensitive=False)(result_id)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """The problems of the settings, for ``manage.py check``. Connects to nothing."""
        options = self.tasks.options
        if options.enqueue_on_commit and options.database not in connections.databases:
            yield checks.Error(
                f"TASKS[{self.alias!r}]: there is no database {options.database!r}.",
                hint="Set the option database to an alias of DATABASES.",
                id="aztask.E001",
            )
        if not self.supports_get_result:
            yield checks.Warning(
                f"TASKS[{self.alias!r}]: there is no result store, so results cannot be read and "
                "an outcome may be recorded twice.",
                hint="Set the option results, or AZTASK_RESULTS.",
                id="aztask.W001",
            )

    def _ready(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        self.validate_task(task)
        return TaskResult(
            task=task,
            id=new_id(),
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )

    def _send(self, result: TaskResult) -> None:
        call = _call(result)
        with sending(call):
            path = result.task.module_path
            self.app.send(path, result.args, result.kwargs, **_options(result))
        _note_sent(result, call)
        task_enqueued.send(sender=type(self), task_result=result)


def _call(result: TaskResult) -> Call:
    task = result.task
    after = None if task.run_after is None else aware(task.run_after).timestamp()
    return Call(task.queue_name, time.time(), after, result.args, result.kwargs)


def _options(result: TaskResult) -> SendOptions:
    options = SendOptions(task_id=result.id, queue=result.task.queue_name)
    if result.task.run_after is not None:
        options["eta"] = aware(result.task.run_after)
    return options


def _note_sent(result: TaskResult, call: Call) -> None:
    object.__setattr__(result, "enqueued_at", at(call.enqueued_at))  # frozen for its readers
