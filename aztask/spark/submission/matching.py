"""Checks that a table fits a task, before anything is sent.

Columns become arguments by *name*. Spark passes rows by position, which would hide two columns of
the same type in the wrong order.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import types as spark
from pyspark.sql.types import StructType

from aztask.app import App
from aztask.errors import ConfigurationError, UnknownTask, did_you_mean
from aztask.message.template import Template
from aztask.spark.submission.submission import Submission
from aztask.spark.submission.values import check_type
from aztask.task import Task

KEY_TYPES = (
    spark.StringType,
    spark.VarcharType,
    spark.CharType,
    spark.ByteType,
    spark.ShortType,
    spark.IntegerType,
    spark.LongType,
    spark.DateType,
)


def matched(
    submission: Submission, schema: StructType, app: App, task: Task[..., Any] | None = None
) -> Submission:
    """The submission with its queue, columns and expiry filled in.

    task: None if the caller has only its name; it is then looked up in `app`, if the submission
    names one. Raises ConfigurationError or UnknownTask, which say what to write instead.
    """
    if task is None and submission.app:
        task = _task_of(app, submission.task)
    names = list(schema.names)
    _check_names(names)
    _check_key(submission.key, schema)
    columns = submission.columns
    if columns is None:
        columns = _all_columns(submission, names, task)
    for _, column in columns:
        if column not in names:
            raise ConfigurationError(
                f"there is no column {column!r}.{did_you_mean(column, names)} "
                f"The columns are {_listed(names)}."
            )
    _check_parameters(columns, submission.task, task)
    for parameter, column in columns:
        check_type(parameter, schema[column].dataType, app.codec)
    queue = app.queue_for(task, {"queue": submission.queue})
    Template(app.codec, submission.task, queue)  # raises if no worker could read a name
    expires = submission.expires
    if expires is None and task is not None:
        expires = task.expires
    return replace(submission, queue=queue, columns=columns, expires=expires)


def _task_of(app: App, name: str) -> Task[..., Any]:
    task = app.tasks.get(name)
    if task is None:
        hint = did_you_mean(name, list(app.tasks))
        raise UnknownTask(f"the app has no task {name!r}.{hint} It has: {_listed(app.tasks)}.")
    return task


def _check_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigurationError(f"there are several columns {twice[0]!r}; rename all but one")


def _check_key(key: str, schema: StructType) -> None:
    if key not in schema.names:
        raise ConfigurationError(
            f"there is no key column {key!r}.{did_you_mean(key, schema.names)} "
            f"The columns are {_listed(schema.names)}."
        )
    kind = schema[key].dataType
    if not isinstance(kind, KEY_TYPES):
        raise ConfigurationError(
            f"the key column {key!r} is of type {kind.simpleString()}: task ids are made from "
            "text, integers or dates; cast it to a string"
        )


def _all_columns(
    submission: Submission, names: Sequence[str], task: Task[..., Any] | None
) -> tuple[tuple[str, str], ...]:
    """Every column as an argument; the key only if the task takes it."""
    if task is None:
        raise ConfigurationError(
            f"the signature of task {submission.task!r} is unknown here: name the columns that are "
            f"its arguments, columns='a,b' or columns='parameter=column,b', or name the app"
        )
    takes, any_name = _keywords(task)
    return tuple(
        (name, name) for name in names if name != submission.key or any_name or name in takes
    )


def _check_parameters(
    columns: Sequence[tuple[str, str]], name: str, task: Task[..., Any] | None
) -> None:
    given = [parameter for parameter, _ in columns]
    twice = [parameter for parameter, count in Counter(given).items() if count > 1]
    if twice:
        raise ConfigurationError(f"two columns are given for the argument {twice[0]!r}")
    if task is None:
        return
    takes, any_name = _keywords(task)
    for parameter in given:
        if parameter not in takes and not any_name:
            raise ConfigurationError(
                f"task {name!r} takes no argument {parameter!r}."
                f"{did_you_mean(parameter, list(takes))} It takes: {_listed(takes)}. Name the "
                "columns to pass, columns='a,b' or columns='parameter=column,b'"
            )
    missing = [name for name, needed in takes.items() if needed and name not in given]
    if missing:
        raise ConfigurationError(
            f"task {name!r} needs {_listed(missing)}, and no column gives it; the given columns "
            f"are {_listed(given)}"
        )
    try:
        task.check_arguments((), dict.fromkeys(given))
    except TypeError as error:
        raise ConfigurationError(str(error)) from None


def _keywords(task: Task[..., Any]) -> tuple[dict[str, bool], bool]:
    """({parameter: whether it is required}, whether the task takes any other name too)."""
    parameters = list(task.signature.parameters.values())[int(task.with_context) :]
    kinds = inspect.Parameter
    takes = {
        each.name: each.default is kinds.empty
        for each in parameters
        if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    return takes, any(each.kind is kinds.VAR_KEYWORD for each in parameters)


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"
