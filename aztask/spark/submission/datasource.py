"""``df.write.format("aztask")`` and ``df.writeStream.format("aztask")``.

Rules
1. Rows are appended to a queue. Overwriting is refused. So is reading: Spark repeats reads, and
   each would take other messages. What happened on a queue is in the event log.
2. The options are those of `aztask.spark.submission.submission.Submission`, as texts. Options and
   schema are checked before the first row is sent. Unique keys are not: checking them needs a job
   of its own, which `aztask.spark.submit` runs.
3. A stream's task ids come from the submission id (by default the query's own id) and the key, with
   ``unique=batch`` also from the batch's number. So a restarted query that repeats a batch sends
   the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from aztask.errors import ConfigurationError, SubmitFailed
from aztask.spark.events.source import EventSource
from aztask.spark.submission.matching import matched
from aztask.spark.submission.send import PartitionReport, partition_number, send_partition
from aztask.spark.submission.submission import Submission
from aztask.spark.submission.submit import SubmitOptions, SubmitReport, planned
from aztask.task import Task

BATCH_PROPERTY = "streaming.sql.batchId"
QUERY_PROPERTY = "sql.streaming.queryId"


def register(spark: SparkSession) -> None:
    """Register the formats ``aztask`` (write tasks) and ``aztask_events`` (read events)."""
    spark.dataSource.register(AztaskDataSource)
    spark.dataSource.register(EventSource)


@dataclass(frozen=True)
class CommitMessage(WriterCommitMessage):
    """The report of one Spark task to the driver."""

    report: PartitionReport


class AztaskDataSource(DataSource):
    """A queue as a sink for batches and streams of rows."""

    @classmethod
    def name(cls) -> str:
        """The format's name in ``df.write.format``."""
        return "aztask"

    def schema(self) -> NoReturn:
        """Refuse to read, see rule 1. Raises ConfigurationError."""
        raise ConfigurationError(
            "format('aztask') only writes: a read would take messages off the queue, with every "
            "action anew; read the event log instead"
        )

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        """Called on the driver before the job."""
        plan = self._plan(schema, overwrite)
        if not plan.submission_id:
            raise ConfigurationError(
                "the option 'submission_id' is missing: choose a name, and use it again in a rerun"
            )
        return Writer(plan)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """Called on the driver before and after each batch."""
        return StreamWriter(self._plan(schema, overwrite))

    def _plan(self, schema: StructType, overwrite: bool) -> Submission:
        if overwrite:
            raise ConfigurationError(
                "a queue cannot be overwritten: use mode('append'), and outputMode('append') for "
                "a stream; aztask queues purge empties a queue"
            )
        requested = Submission.from_options(dict(self.options))
        if requested.rate is not None and requested.writers is None:
            raise ConfigurationError(
                "rate needs writers: the number of partitions that share it, as in "
                "df.coalesce(8).write.option('rate', 400).option('writers', 8)"
            )
        app = requested.open_app()
        try:
            return matched(requested, schema, app)
        finally:
            app.close()


class Writer(DataSourceArrowWriter):
    """Sends the rows of a batch job, see `DataSourceArrowWriter`."""

    def __init__(self, plan: Submission) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """Called on executors, once for each partition and attempt."""
        return CommitMessage(send_partition(self._plan, iterator, partition=partition_number()))

    def commit(self, messages: Sequence[Any]) -> None:
        """Called on the driver at the end. Fails the job unless all rows were sent."""
        check_messages(self._plan, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of each micro-batch of a stream."""

    def __init__(self, plan: Submission) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """Called on executors, once for each partition and attempt of a batch."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_PROPERTY) if context else None
        batch = context.getLocalProperty(BATCH_PROPERTY) if context else None
        if batch is None or (not query and not self._plan.submission_id):
            raise ConfigurationError(
                "Spark gives no query id or batch number here: set submission_id, and use a key "
                "that is unique in the whole stream"
            )
        plan = self._plan.in_batch(query or "", batch)
        return CommitMessage(send_partition(plan, iterator, partition=partition_number()))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Called on the driver after each batch.

        If it raises, or the driver dies before it, a restarted query sends the batch again under
        the same ids.
        """
        check_messages(self._plan, messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Nothing to undo: sent tasks stay sent, and Spark will repeat the batch."""


def check_messages(plan: Submission, messages: Sequence[Any]) -> None:
    """Raise SubmitFailed unless every partition reported and all rows were sent."""
    silent = sum(not isinstance(each, CommitMessage) for each in messages)
    if silent:
        raise SubmitFailed(
            f"{silent} of {len(messages)} partitions did not report what they sent; write again "
            "under the same submission id"
        )
    SubmitReport.of(
        (each.report for each in messages),
        submission_id=plan.submission_id,
        task=plan.task,
        queue=plan.queue or "",
        seconds=0.0,
    ).check()


# -- ``stream(df, task, ...)``: every row of a streaming DataFrame becomes one task, once --
#
# A query that was stopped or died continues from its checkpoint. Spark may repeat the last batch;
# its rows then get the same task ids, and workers with a result store run each id once.


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
