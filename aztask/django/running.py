"""One run of a Django task on a worker: its context, its signals and its database connections.

Rules
1. Database connections are closed around each run as Django closes them around a request: broken
   ones, and those older than CONN_MAX_AGE. As under ASGI, a coroutine that calls synchronous code
   (`sync_to_async`, the ORM) gets a thread of its own for it; one that does not needs none.
2. An error of a signal's receiver is logged by Django and does not fail the task.
3. ``task_finished`` is sent once, when the task will not run again. A run that the worker kills
   sends none, because its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, iscoroutinefunction, signature
from traceback import format_exception
from typing import Any, Final

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, reset_queries
from django.utils import timezone

from aztask.context import Context
from aztask.django.api import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    at,
    normalize_json,
    task_finished,
    task_started,
    times_in,
)
from aztask.django.results import ReturnValueError, attempts_of, configured, path_of
from aztask.django.taskapp import TaskApp
from aztask.errors import EncodeError, LeaseLost
from aztask.settlement import DeadLetter

CONTEXT: Final = "context"


class DjangoRun:
    """One run, with the `TaskResult` that the task and the receivers of signals see."""

    def __init__(
        self,
        tasks: TaskApp,
        path: str,
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """path: that of a registered task."""
        message = context.message
        enqueued_at, run_after = times_in(message.extra)
        self.task = tasks.known[path]
        self._tasks = tasks
        self._context = context
        now = timezone.now()
        started_at, workers = now, [tasks.worker]
        if message.resubmit_count or context.delivery_count > 1:
            started_at, workers = attempts_of(tasks, message.id) or (
                now,  # there is no result store that knows
                [tasks.worker] * (message.resubmit_count + 1),
            )
        self.result = TaskResult(
            task=configured(self.task, tasks.alias, message.queue, run_after),
            id=message.id,
            status=TaskResultStatus.RUNNING,
            enqueued_at=at(context.enqueued_at or None if enqueued_at is None else enqueued_at),
            started_at=started_at,
            finished_at=None,
            last_attempted_at=now,
            args=list(args),
            kwargs=kwargs,
            backend=tasks.alias,
            errors=[],
            worker_ids=workers,
        )
        self.args = [TaskContext(task_result=self.result)] if self.task.takes_context else []
        self.args += args
        self.kwargs = kwargs

    @property
    def signal(self) -> dict[str, Any]:
        """The arguments of a signal."""
        return {"sender": self._tasks.backend, "task_result": self.result}

    def value(self, value: Any) -> Any:
        """The JSON form of what the task returned. Raises ReturnValueError."""
        try:
            normal = normalize_json(value)
        except (TypeError, ValueError) as error:
            raise ReturnValueError(str(error)) from None
        self._set(
            status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=normal
        )
        return normal

    def failed(self, error: BaseException) -> bool:
        """Take note of an error; True if the task will not run again."""
        if isinstance(error, LeaseLost):
            return False  # another worker runs it
        self.result.errors.append(
            TaskError(
                exception_class_path=path_of(type(error)),
                traceback="".join(format_exception(error)),
            )
        )
        registered = self._tasks.app.tasks[self.task.module_path]
        verdict = registered.retry.decide(error, self._context.message)
        final = isinstance(error, EncodeError) or isinstance(verdict, DeadLetter)
        if final:
            self._set(status=TaskResultStatus.FAILED, finished_at=timezone.now())
        else:
            self._set(status=TaskResultStatus.READY)
        return final

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self.result, name, value)  # it is frozen for its readers


def wrap(tasks: TaskApp, path: str) -> Callable[..., Any]:
    """The function that the worker calls for the task of this path."""
    function = tasks.known[path].func

    def run(context: Context, /, *args: Any, **kwargs: Any) -> Any:
        close_old_connections()
        reset_queries()
        try:
            return _run(DjangoRun(tasks, path, context, args, kwargs))
        finally:
            close_old_connections()

    async def arun(context: Context, /, *args: Any, **kwargs: Any) -> Any:
        make = sync_to_async(DjangoRun, thread_sensitive=False)  # it may read the result store
        run = await make(tasks, path, context, args, kwargs)
        own = ThreadSensitiveContext()
        async with own:
            try:
                return await _arun(run)
            finally:
                if own in SyncToAsync.context_to_thread_executor:  # the task has used its thread
                    await sync_to_async(close_old_connections, thread_sensitive=True)()

    wrapper: Callable[..., Any] = arun if iscoroutinefunction(function) else run
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, name, getattr(function, name))
    wrapper.__signature__ = _signature(tasks.known[path])  # type: ignore[attr-defined]
    return wrapper


def _signature(task: Any) -> Signature:
    """The function's signature as `aztask tasks` shows it, with a context in front."""
    own = signature(task.func)
    if task.takes_context:
        return own
    parameters = [each for each in own.parameters.values() if each.name != CONTEXT]
    first = Parameter(CONTEXT, Parameter.POSITIONAL_ONLY)
    return own.replace(parameters=[first, *parameters])


def _run(run: DjangoRun) -> Any:
    task_started.send_robust(**run.signal)
    try:
        value = run.value(run.task.func(*run.args, **run.kwargs))
    except BaseException as error:
        if run.failed(error):
            task_finished.send_robust(**run.signal)
        raise
    task_finished.send_robust(**run.signal)
    return value


async def _arun(run: DjangoRun) -> Any:
    await _notify(task_started, run)
    try:
        value = run.value(await run.task.func(*run.args, **run.kwargs))
    except BaseException as error:
        if run.failed(error):
            await _notify(task_finished, run)
        raise
    await _notify(task_finished, run)
    return value


async def _notify(signal: Any, run: DjangoRun) -> None:
    """Send a signal from a shared thread, because receivers may use the database."""

    def send() -> None:
        close_old_connections()
        signal.send_robust(**run.signal)
        close_old_connections()

    await sync_to_async(send, thread_sensitive=False)()
