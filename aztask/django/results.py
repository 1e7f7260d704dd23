"""What the result store knows of a task, as Django's `TaskResult`.

| Django's status | aztask's states |
|---|---|
| READY | pending, retrying, snoozed |
| RUNNING | started |
| SUCCESSFUL | succeeded |
| FAILED | failed, cancelled, expired, unreadable |
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import aztask.errors
from aztask.django.api import (
    InvalidTask,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    at,
    noted,
)
from aztask.django.taskapp import TaskApp
from aztask.errors import BrokerError, CodecError, EncodeError
from aztask.stores.records.base import Outcome, RunRecord, State

ID_CHARACTERS: Final = 64
"""The longest id of a Django task."""

_STATUS: Final = {
    State.PENDING: TaskResultStatus.READY,
    State.RETRYING: TaskResultStatus.READY,
    State.SNOOZED: TaskResultStatus.READY,
    State.STARTED: TaskResultStatus.RUNNING,
    State.SUCCEEDED: TaskResultStatus.SUCCESSFUL,
}
_NEVER_RAN: Final = {
    State.CANCELLED: ("TaskCancelled", "the task was cancelled before it ran"),
    State.EXPIRED: ("TaskExpired", "the task was not run: it had expired"),
}


class ReturnValueError(EncodeError, TypeError):
    """A task returned a value that is not JSON. It is not retried: it would return the same.

    Django's own backends report a TypeError, so a `TaskResult` shows that.
    """


def result_of(tasks: TaskApp, task_id: object) -> TaskResult:
    """The result of this id. Raises TaskResultDoesNotExist, and BrokerUnavailable."""
    if not isinstance(task_id, str) or not 0 < len(task_id) <= ID_CHARACTERS:
        raise TaskResultDoesNotExist(task_id)
    store = tasks.app.results
    if store is None:
        raise NotImplementedError(
            "This backend does not support retrieving or refreshing results: "
            f"TASKS[{tasks.alias!r}]['OPTIONS'] has no results."
        )
    history = store.history(task_id)
    latest = store.get(task_id) if history else None
    if latest is None:
        raise TaskResultDoesNotExist(task_id)
    history = [*(each for each in history if each.key != latest.key), latest]
    call = noted(next((each.note for each in history if each.note), None))
    path = next((each.task for each in history if each.task), "")
    if path not in tasks.known:
        tasks.load()
    if path not in tasks.known:
        raise TaskResultDoesNotExist(
            f"{task_id}: its task {path!r} is in no module with tasks that this process may import"
        )
    task = configured(tasks.known[path], tasks.alias, call.queue or latest.queue, call.run_after)
    status = _STATUS.get(latest.state, TaskResultStatus.FAILED)
    errors = [error for each in history for error in errors_of(each)]
    value: Any = None
    if status is TaskResultStatus.SUCCESSFUL:
        try:
            value = _value(tasks, latest)
        except CodecError as damage:
            status = TaskResultStatus.FAILED
            errors.append(_error("ResultDamaged", str(damage)))
    ended = latest.outcome.at if latest.outcome is not None and latest.state.final else None
    result = TaskResult(
        task=task,
        id=task_id,
        status=status,
        enqueued_at=at(call.enqueued_at),
        started_at=started(history),
        last_attempted_at=at(latest_start(history)),
        finished_at=at(ended),
        args=call.args,
        kwargs=call.kwargs,
        backend=tasks.alias,
        errors=errors,
        worker_ids=workers(history),
    )
    object.__setattr__(result, "_return_value", value)
    return result


def configured(task: Any, alias: str, queue: str, run_after: float | None) -> Any:
    """The task as it was enqueued: with the backend, the queue and the time of that call."""
    changes: dict[str, Any] = {}
    if task.backend != alias:
        changes["backend"] = alias
    if queue and queue != task.queue_name:
        changes["queue_name"] = queue
    moment = at(run_after)
    if moment is not None:
        changes["run_after"] = moment
    if not changes:
        return task
    try:
        return task.using(**changes)
    except InvalidTask:  # it came from a queue that the settings no longer have
        return task


def attempts_of(tasks: TaskApp, task_id: str) -> tuple[datetime | None, list[str]] | None:
    """When a task was started first, and the worker of each attempt; None if that is not known."""
    store = tasks.app.results
    try:
        history = store.history(task_id) if store is not None else []
    except BrokerError:  # the run itself does not need the store
        return None
    return (started(history), workers(history)) if workers(history) else None


def started(history: Sequence[RunRecord]) -> datetime | None:
    """When the task was started first."""
    return at(min((each.started_at for each in history if each.started_at), default=None))


def latest_start(history: Sequence[RunRecord]) -> float | None:
    """When the task was started last, in UTC epoch seconds."""
    return max((each.started_at for each in history if each.started_at), default=None)


def workers(history: Sequence[RunRecord]) -> list[str]:
    """The worker of each attempt. A run that several workers started has the last one's name."""
    return [
        name
        for each in history
        if each.started_at is not None
        for name in [each.worker] * max(1, each.starts)
    ]


def errors_of(record: RunRecord) -> list[TaskError]:
    """The error with which a run ended."""
    if record.damage:
        return [_error("ResultDamaged", record.damage)]
    if record.state in _NEVER_RAN:
        return [_error(*_NEVER_RAN[record.state])]
    outcome = record.outcome
    if outcome is None or not outcome.error_type:
        return []
    text = outcome.traceback or f"{outcome.error_type}: {outcome.error}"
    text = text if text.endswith("\n") else f"{text}\n"
    return [TaskError(exception_class_path=class_path(outcome), traceback=text)]


def class_path(outcome: Outcome) -> str:
    """The path of the error's class, such as ``shop.errors.SoldOut``.

    The store has the class's name; the traceback's line of the error has its module too, unless it
    is a built-in one. What no traceback names is an error of aztask, such as a time limit.
    """
    name = outcome.error_type
    if name == ReturnValueError.__name__:
        return path_of(ReturnValueError)
    lines = re.findall(
        rf"^((?:[A-Za-z_][\w.<>]*\.)?{re.escape(name)})(?::|$)", outcome.traceback, re.MULTILINE
    )
    if lines and "." in lines[-1]:
        return str(lines[-1])
    if hasattr(builtins, name):
        return f"builtins.{name}"
    if hasattr(aztask.errors, name):
        return f"aztask.errors.{name}"
    return "aztask.errors.TaskFailed"


def path_of(kind: type[BaseException]) -> str:
    """The path of an error's class, as Django imports it."""
    shown = TypeError if kind is ReturnValueError else kind
    return f"{shown.__module__}.{shown.__qualname__}"


def _error(name: str, text: str) -> TaskError:
    return TaskError(exception_class_path=f"aztask.errors.{name}", traceback=f"{name}: {text}\n")


def _value(tasks: TaskApp, record: RunRecord) -> Any:
    """The value that a task returned. Raises CodecError."""
    outcome = record.outcome
    if outcome is None or not outcome.value:
        return None
    return tasks.app.codec.decode_value(outcome.value)
