"""Converts the values of columns into arguments of tasks.

================================  ================================================================
Spark                             the task's argument
================================  ================================================================
boolean, byte to long             bool, int
float, double                     float (NaN and infinities too; not with the json serializer)
string, binary                    str, bytes
decimal                           Decimal
date                              date
timestamp                         datetime, in UTC
timestamp_ntz                     datetime without a time zone
interval day to second            timedelta
array, struct, map                list, dict by field name, dict
null                              None
interval year to month, variant,  refused before anything is sent; cast it, to a string for example
calendar interval, user-defined
================================  ================================================================

Rules
1. A whole column is converted at once, because a submission spends much of its time here.
2. The schema shows which columns cannot be sent. Only single values can still fail: one that is too
   long, one that Python cannot hold (text that is not UTF-8, a date after the year 9999) or, with
   the json serializer, a NaN or an infinity. Such a value fails only its own row.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark

from aztask.errors import ConfigurationError, EncodeError
from aztask.message.codec import Codec
from aztask.support.display import safe_str

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


def check_type(name: str, kind: spark.DataType, codec: Codec) -> None:
    """Raise ConfigurationError if values of a column cannot be arguments of a task."""
    try:
        given = {name: _sample(kind)}
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


def _sample(kind: spark.DataType) -> Any:
    """A value of that type. Raises LookupError with the name of the part that cannot be sent."""
    if isinstance(kind, spark.ArrayType):
        return [_sample(kind.elementType)]
    if isinstance(kind, spark.StructType):
        return {field.name: _sample(field.dataType) for field in kind.fields}
    if isinstance(kind, spark.MapType):
        key = _sample(kind.keyType)
        if not isinstance(key, str | int):
            raise LookupError(f"a map whose keys are {kind.keyType.simpleString()}")
        return {key: _sample(kind.valueType)}
    if type(kind) not in _SAMPLES:
        raise LookupError(kind.simpleString())
    return _SAMPLES[type(kind)]


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
