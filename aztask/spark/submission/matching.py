"""Checks that a table fits a task, before anything is sent.

Rules
1. Columns become arguments by *name*. Spark passes rows by position, which would hide two columns
   of the same type in the wrong order.
2. The type of a column must fit the annotation of its parameter, as `aztask.typed` reads it. Types
   are compared, not values: any text fits an enum of texts. What has no annotation, or one that
   cannot be resolved, is not checked.
3. A null is None if the annotation takes None, or says nothing. Otherwise it stands for the
   parameter's default: the argument is not passed. Without a default the row cannot be sent.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.types import StructType

from aztask.app import App
from aztask.errors import ConfigurationError, EncodeError, UnknownTask, did_you_mean
from aztask.message.codec import Codec
from aztask.message.template import Template
from aztask.spark.submission.submission import Submission
from aztask.support.display import one_line, safe_str
from aztask.task import Task
from aztask.typed.shapes import AnyKeys

# -- converts the values of columns into arguments of tasks --------------------------------
#
# ================================  ================================================================
# Spark                             the task's argument
# ================================  ================================================================
# boolean, byte to long             bool, int
# float, double                     float (NaN and infinities too; not with the json serializer)
# string, binary                    str, bytes
# decimal                           Decimal
# date                              date
# timestamp                         datetime, in UTC
# timestamp_ntz                     datetime without a time zone
# interval day to second            timedelta
# array, struct, map                list, dict by field name, dict
# null                              None
# interval year to month, variant,  refused before anything is sent; cast it, to a string for
# example calendar interval, user-defined
# ================================  ================================================================
#
# Rules
# 1. A whole column is converted at once, because a submission spends much of its time here.
# 2. The schema shows which columns cannot be sent. Only single values can still fail: one that is
#    too long, one that Python cannot hold (text that is not UTF-8, a date after the year 9999) or,
#    with the json serializer, a NaN or an infinity. Such a value fails only its own row.


_UTC = pa.timestamp("us", tz="UTC")

_UNREADABLE = (pa.ArrowException, ValueError, OverflowError, KeyError)
"""What Arrow raises for a value that Python cannot hold."""

_SAMPLES: dict[type[spark.DataType], Any] = {
    spark.BooleanType: True,
    spark.ByteType: 1,
    spark.ShortType: 1,
    spark.IntegerType: 1,
    spark.LongType: 1,
    spark.FloatType: 1.5,
    spark.DoubleType: 1.5,
    spark.StringType: "text",
    spark.CharType: "text",
    spark.VarcharType: "text",
    spark.BinaryType: b"bytes",
    spark.DecimalType: Decimal("1.5"),
    spark.DateType: date(2000, 1, 1),
    spark.TimestampType: datetime(2000, 1, 1, tzinfo=UTC),
    spark.TimestampNTZType: datetime(2000, 1, 1),
    spark.DayTimeIntervalType: timedelta(1),
    spark.NullType: None,
}
"""A value of each type, to test whether the serializer can write it."""


def check_type(parameter: str, name: str, kind: spark.DataType, codec: Codec) -> None:
    """Raise ConfigurationError if values of a column cannot be arguments of a task."""
    try:
        given = {parameter: _sample(kind)}
        body, content_type, _ = codec.encode_arguments((), given)
    except LookupError as error:
        raise ConfigurationError(
            f"column {name!r} is of type {kind.simpleString()}, and {error.args[0]} cannot be "
            "sent in a message: cast it, to a string for example, or drop the column"
        ) from None
    except EncodeError as error:
        raise ConfigurationError(
            f"column {name!r} of type {kind.simpleString()} cannot be written by the "
            f"{codec.serializer} serializer: {error}"
        ) from None
    if codec.decode_body(body, content_type)[1] != given:
        raise ConfigurationError(
            f"column {name!r} of type {kind.simpleString()} would be changed by the "
            f"{codec.serializer} serializer, which cannot write it; use msgpack, or cast it"
        )


def _sample(kind: spark.DataType, maps: type[dict[Any, Any]] = dict) -> Any:
    """A value of that type. Raises LookupError with the name of the part that cannot be sent.

    maps: the class of the samples of maps.
    """
    if isinstance(kind, spark.ArrayType):
        return [_sample(kind.elementType, maps)]
    if isinstance(kind, spark.StructType):
        return {field.name: _sample(field.dataType, maps) for field in kind.fields}
    if isinstance(kind, spark.MapType):
        key = _sample(kind.keyType)
        if not isinstance(key, str | int):
            raise LookupError(f"a map whose keys are {kind.keyType.simpleString()}")
        return maps({key: _sample(kind.valueType, maps)})
    if type(kind) not in _SAMPLES:
        raise LookupError(kind.simpleString())
    return _SAMPLES[type(kind)]


# -- compares the types of columns with the annotations of parameters ----------------------


_CASTS: Final = {
    "string": "text",
    "double": 1.5,
    "bigint": 1,
    "boolean": True,
    "date": date(2000, 1, 1),
    "timestamp": datetime(2000, 1, 1, tzinfo=UTC),
    "decimal(38,18)": Decimal("1.5"),
    "binary": b"bytes",
    "interval day to second": timedelta(1),
}
"""Types to cast a column to, with a sample. The first that fits is advised, so of two that fit, a
double for ``float`` and a date for ``date``, the natural one comes first."""
TYPE_CHARACTERS: Final = 200


def check_fit(parameter: str, column: str, kind: spark.DataType, task: Task[..., Any]) -> None:
    """Raise ConfigurationError if a column's type does not fit the annotation of its parameter.

    Nulls are not looked at, see `nulls_of`.
    """
    why_not = partial(task.conversion.why_not, parameter, by_type=True)
    why = "" if isinstance(kind, spark.NullType) else why_not(_sample(kind, maps=AnyKeys))
    if not why:
        return
    cast = next((name for name, sample in _CASTS.items() if not why_not(sample)), None)
    annotation = task.conversion.annotation_of(parameter)
    inside = "" if why.startswith(f"{parameter} is ") else f" ({why})"
    raise ConfigurationError(
        f"column {column!r} is of type {one_line(kind.simpleString(), TYPE_CHARACTERS)}, and task "
        f"{task.name!r} takes {parameter}: {annotation}{inside}; "
        + (
            f"cast it to {cast}, or read the files with a schema that says so"
            if cast
            else "annotate what the column holds, or give it the parts that the annotation names"
        )
    )


def nulls_of(
    columns: Sequence[tuple[str, str]], schema: StructType, task: Task[..., Any]
) -> tuple[tuple[str, str], ...]:
    """`Submission.nulls`: what becomes of a null, for each argument that takes no None."""
    takes, _ = _keywords(task)
    found = []
    for parameter, column in columns:
        annotation = task.conversion.annotation_of(parameter)
        optional = annotation is not None and not task.conversion.why_not(parameter, None)
        if optional or not schema[column].nullable:
            continue
        if not takes.get(parameter, True):
            found.append((parameter, ""))
        elif annotation is not None:
            found.append((parameter, annotation))
    return tuple(found)


def readable(column: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """(the values as in `plain`, {index: reason} of those that Python cannot hold).

    A value that Python cannot hold is None in the list.
    """
    try:
        return plain(column), {}
    except _UNREADABLE:
        pass
    values: list[Any] = []
    reasons: dict[int, str] = {}
    for place in range(len(column)):
        try:
            values += _one_by_one(column.slice(place, 1))
        except _UNREADABLE as error:
            values.append(None)
            reasons[place] = f"Python cannot hold the value ({safe_str(error)})"
    return values, reasons


def plain(column: pa.Array) -> list[Any]:
    """The values of an Arrow column, converted as in the table of this module."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return _quick(column)
    if column.null_count == 0 and (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    ):
        return _quick(column)
    return _one_by_one(column)


def _one_by_one(column: pa.Array) -> list[Any]:
    """As `plain`, for every type, by Arrow's own conversion."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return list(column.cast(_UTC).to_pylist())
    if pa.types.is_nested(kind):
        return list(column.to_pylist(maps_as_pydicts="strict"))
    return list(column.to_pylist())


def _quick(column: pa.Array) -> list[Any]:
    """Convert through NumPy, several times faster than Arrow. Nulls of object columns stay None."""
    return list(column.to_numpy(zero_copy_only=False).tolist())


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
        check_type(parameter, column, schema[column].dataType, app.codec)
        if task is not None:
            check_fit(parameter, column, schema[column].dataType, task)
    nulls = submission.nulls if task is None else nulls_of(columns, schema, task)
    queue = app.queue_for(task, {"queue": submission.queue})
    Template(app.codec, submission.task, queue)  # raises if no worker could read a name
    expires = submission.expires
    if expires is None and task is not None:
        expires = task.expires
    return replace(submission, queue=queue, columns=columns, nulls=nulls, expires=expires)


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
