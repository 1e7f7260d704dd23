"""Checks that keys are unique and not null, with one job over the key column."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aztask.errors import ConfigurationError
from aztask.support.display import short_repr

SHOWN = 3


def check_keys(frame: DataFrame, key: str) -> int:
    """Return the number of rows. Raises ConfigurationError if a key is null or repeats.

    Reads the key column once and shuffles its distinct values. If keys repeat, it reads the column
    a second time, to name some of them.
    """
    keys = frame.select(column(key).alias("key"))
    row = keys.agg(
        F.count(F.lit(1)).alias("rows"),
        F.count("key").alias("keys"),
        F.count_distinct("key").alias("distinct"),
    ).first()
    assert row is not None  # noqa: S101  # an aggregate without groups has one row
    rows, not_null, distinct = int(row["rows"]), int(row["keys"]), int(row["distinct"])
    if not_null < rows:
        raise ConfigurationError(
            f"the key column {key!r} is null in {rows - not_null:,} of {rows:,} rows: every row "
            "needs a key; nothing was sent"
        )
    if distinct < not_null:
        counted = keys.groupBy("key").count().where("count > 1").orderBy("key").limit(SHOWN)
        shown = ", ".join(short_repr(each["key"]) for each in counted.collect())
        raise ConfigurationError(
            f"the key column {key!r} has {distinct:,} different values in {rows:,} rows, and equal "
            f"keys are one task (repeated keys include {shown}); nothing was sent"
        )
    return rows


def column(name: str) -> Column:
    """A column by its exact name, which may contain dots."""
    return F.col(f"`{name.replace('`', '``')}`")
