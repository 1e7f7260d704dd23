"""``df.write.format("aztask")`` and ``df.writeStream.format("aztask")``.

Rules
1. Rows are appended to a queue. Overwriting is refused, and so is reading: a read that takes
   messages would take others when Spark repeats it. What a queue did is in the event log.
2. The options are those of `aztask.spark.submission.submission.Submission`, as texts. Everything
   that schema and options tell is checked before the first row is sent. Whether keys are unique is
   not: that needs a job of its own, which `aztask.spark.submit` runs.
3. A stream's ids come from (submission id, or the query's own id; key), or with ``unique=batch``
   from these and the batch's number: a restarted query that sends a batch again sends the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from aztask.errors import ConfigurationError, SubmitFailed
from aztask.spark.events.source import EventSource
from aztask.spark.submission.matching import matched
from aztask.spark.submission.report import SubmitReport
from aztask.spark.submission.send import PartitionReport, partition_number, send_partition
from aztask.spark.submission.submission import Submission

BATCH_PROPERTY = "streaming.sql.batchId"
QUERY_PROPERTY = "sql.streaming.queryId"


def register(spark: SparkSession) -> None:
    """Make the formats ``aztask`` (tasks, to write) and ``aztask_events`` known to a session."""
    spark.dataSource.register(AztaskDataSource)
    spark.dataSource.register(EventSource)


@dataclass(frozen=True)
class CommitMessage(WriterCommitMessage):
    """What one Spark task sent."""

    report: PartitionReport


class AztaskDataSource(DataSource):
    """A queue as a sink of Spark."""

    @classmethod
    def name(cls) -> str:
        """What stands in ``format(...)``."""
        return "aztask"

    def schema(self) -> NoReturn:
        """Reading is refused."""
        raise ConfigurationError(
            "format('aztask') writes only: reading a queue would take its messages, again with "
            "every action; read the event log instead"
        )

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        """Called on the driver, before the job."""
        plan = self._plan(schema, overwrite)
        if not plan.submission_id:
            raise ConfigurationError(
                "the option 'submission_id' is missing: a name that a rerun gives again"
            )
        return Writer(plan)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """Called on the driver, before each batch and after it."""
        return StreamWriter(self._plan(schema, overwrite))

    def _plan(self, schema: StructType, overwrite: bool) -> Submission:
        if overwrite:
            raise ConfigurationError(
                "a queue cannot be overwritten: use mode('append'), and outputMode('append') for "
                "a stream; aztask queues purges what is in a queue"
            )
        wish = Submission.from_options(dict(self.options))
        if wish.rate is not None and wish.writers is None:
            raise ConfigurationError(
                "rate needs writers: the number of partitions that share it, as in "
                "df.coalesce(8).write.option('rate', 400).option('writers', 8)"
            )
        app = wish.open_app()
        try:
            return matched(wish, schema, app)
        finally:
            app.close()


class Writer(DataSourceArrowWriter):
    """Sends the rows of a batch job."""

    def __init__(self, plan: Submission) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """Called on executors, once for each partition and attempt."""
        return CommitMessage(send_partition(self._plan, iterator, partition=partition_number()))

    def commit(self, messages: Sequence[Any]) -> None:
        """Called on the driver at the end: the numbers must add up, or the job fails."""
        check_messages(self._plan, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of each micro-batch."""

    def __init__(self, plan: Submission) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CommitMessage:
        """Called on executors, once for each partition and attempt of a batch."""
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_PROPERTY) if context else None
        batch = context.getLocalProperty(BATCH_PROPERTY) if context else None
        if batch is None or (not query and not self._plan.submission_id):
            raise ConfigurationError(
                "Spark does not tell the query's id or the batch's number: give submission_id, and "
                "a key that is unique in the whole stream"
            )
        plan = self._plan.in_batch(query or "", batch)
        return CommitMessage(send_partition(plan, iterator, partition=partition_number()))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Called on the driver after each batch.

        If it raises, or the driver dies before, a restarted query sends the batch again, under the
        same ids.
        """
        check_messages(self._plan, messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """What was sent stays sent; the batch will come again."""


def check_messages(plan: Submission, messages: Sequence[Any]) -> None:
    """Raise SubmitFailed unless every partition told of its rows and all of them were sent."""
    silent = sum(not isinstance(each, CommitMessage) for each in messages)
    if silent:
        raise SubmitFailed(
            f"{silent} of {len(messages)} partitions did not say what they sent; write again under "
            "the same submission id"
        )
    SubmitReport.of(
        (each.report for each in messages),
        submission_id=plan.submission_id,
        task=plan.task,
        queue=plan.queue or "",
        seconds=0.0,
    ).check()
