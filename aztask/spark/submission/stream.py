"""``stream(df, task, ...)``: every row of a streaming DataFrame becomes one task, once.

A query that was stopped or died continues from its checkpoint. Spark may repeat the last batch;
its rows then get the same task ids, and workers with a result store run each id once.
"""

from __future__ import annotations

from typing import Any, Unpack

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from aztask.errors import ConfigurationError
from aztask.spark.submission.datasource import AztaskDataSource, register
from aztask.spark.submission.submit import SubmitOptions, planned
from aztask.task import Task


def stream(
    df: DataFrame,
    task: Task[..., Any] | str,
    *,
    key: str,
    checkpoint: str,
    submission_id: str = "",
    unique: str = "stream",
    available_now: bool = False,
    trigger: float | None = None,
    name: str | None = None,
    **options: Unpack[SubmitOptions],
) -> StreamingQuery:
    """Start a query that sends one invocation of `task` for each row, and return the query.

    checkpoint: the folder where Spark records its progress.
    key, submission_id: make the task ids, as in `aztask.spark.submit`; without a submission id the
        query's own id is used, which changes with the checkpoint folder.
    unique: "stream" if a key never repeats, "batch" if it may occur once in each batch.
    available_now: send the rows that exist now, then end.
    trigger: seconds between two batches; None: as soon as possible.
    name: the query's.
    options: see `aztask.spark.submission.submit.SubmitOptions`; at most `writers` partitions share
        a rate.

    Raises ConfigurationError. A later error ends the query: see its ``exception()``.
    """
    if not df.isStreaming:
        raise ConfigurationError("this table is not a stream: use aztask.spark.submit")
    plan = planned(df, task, key=key, submission_id=submission_id, unique=unique, options=options)
    register(df.sparkSession)
    frame = df if plan.rate is None else df.coalesce(plan.writers or 1)
    writer = frame.writeStream.format(AztaskDataSource.name()).outputMode("append")
    writer = writer.options(**plan.as_options()).option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif trigger is not None:
        writer = writer.trigger(processingTime=f"{trigger * 1000:.0f} milliseconds")
    return writer.start()
