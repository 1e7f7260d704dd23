"""``submit(df, task, ...)``: every row of a DataFrame becomes one task, once.

Crash window: a job that dies half-way has sent some of its rows. Submit again under the same
submission id: all rows are sent again under the same task ids, and workers with a result store run
each id once, as long as results are kept. Without a result store, a task that was sent twice runs
twice, unless the duplicate detection of a Service Bus queue drops the second message.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from aztask.app import App
from aztask.errors import ConfigurationError, SubmitFailed
from aztask.message.codec import Codec
from aztask.spark.kind import SPARK_ERRORS, cores
from aztask.spark.session import as_ours
from aztask.spark.submission.matching import matched
from aztask.spark.submission.results import RESULT, beside, write_manifest
from aztask.spark.submission.send import MAX_ERRORS, REPORT_SCHEMA, PartitionReport, send_batches
from aztask.spark.submission.submission import Submission, Target, pairs_of, selected
from aztask.support.display import one_line, short_repr
from aztask.task import Task
from aztask.taskoptions import check_options

# -- checks keys and nulls, with one job over their columns --------------------------------


SHOWN = 3


def check_keys(frame: DataFrame, key: str, needed: Sequence[tuple[str, str]] = ()) -> int:
    """Return the number of rows. Raises ConfigurationError if a key is null or repeats.

    needed: pairs (column, what it is needed for), in which no value may be null either.

    Reads these columns once and shuffles the distinct keys. If keys repeat, it reads the key column
    a second time, to name some of them.
    """
    keys = selected(frame, [key]).withColumnRenamed("column0", "key")
    values = [f"column{n}" for n in range(1, len(needed) + 1)]
    row = (
        selected(frame, [key, *(name for name, _ in needed)])
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.count("column0").alias("keys"),
            F.count_distinct("column0").alias("distinct"),
            *(F.count(each).alias(each) for each in values),
        )
        .first()
    )
    assert row is not None  # noqa: S101  # an aggregate without groups has one row
    rows, not_null, distinct = int(row["rows"]), int(row["keys"]), int(row["distinct"])
    if not_null < rows:
        raise ConfigurationError(
            f"the key column {key!r} is null in {rows - not_null:,} of {rows:,} rows: every row "
            "needs a key; nothing was sent"
        )
    for each, (name, purpose) in zip(values, needed, strict=True):
        if missing := rows - int(row[each]):
            raise ConfigurationError(
                f"column {name!r} is null in {missing:,} of {rows:,} rows, and {purpose}, without "
                "a default: drop these rows, fill them with coalesce, or annotate it with | None; "
                "nothing was sent"
            )
    if distinct < not_null:
        counted = keys.groupBy("key").count().where("count > 1").orderBy("key").limit(SHOWN)
        shown = ", ".join(short_repr(each["key"]) for each in counted.collect())
        raise ConfigurationError(
            f"the key column {key!r} has {distinct:,} different values in {rows:,} rows, and equal "
            f"keys are one task (repeated keys include {shown}); nothing was sent"
        )
    return rows


# -- the report of a submission, which compares rows read with messages sent ---------------


@dataclass(frozen=True)
class SubmitReport:
    """The outcome of a submission.

    rows: as Spark itself counted them.
    sent: messages that the broker accepted, one for each row.
    retried: repeated sends; they add no messages, or duplicates that workers drop.
    failed: rows that could not be sent.
    seconds: from the first job to the last answer.
    checked: whether the keys were checked.
    dry_run: nothing was sent, and `sent` counts the messages that would have been.
    errors: the first few reasons of failed rows.
    plan: what was sent where, for `join`; no part of `as_dict`.
    """

    submission_id: str
    task: str
    queue: str
    rows: int
    sent: int
    retried: int
    failed: int
    partitions: int
    seconds: float
    checked: bool = False
    dry_run: bool = False
    errors: tuple[str, ...] = ()
    plan: Submission | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, reports: Iterable[PartitionReport], *, rows: int | None = None, **about: Any
    ) -> Self:
        """The sum of the partitions. rows: Spark's count; None: the partitions' own."""
        parts = list(reports)
        errors = [line for part in parts for line in part.errors.splitlines()]
        return cls(
            rows=sum(part.rows for part in parts) if rows is None else rows,
            sent=sum(part.sent for part in parts),
            retried=sum(part.retried for part in parts),
            failed=sum(part.failed for part in parts),
            partitions=len(parts),
            errors=tuple(errors[:MAX_ERRORS]),
            **about,
        )

    def check(self) -> None:
        """Raise SubmitFailed, which carries this report, unless every row was sent."""
        if self.rows != self.sent + self.failed:
            raise SubmitFailed(
                f"the numbers do not add up: {self.rows:,} rows, {self.sent:,} sent and "
                f"{self.failed:,} failed; submit again under the submission id "
                f"{one_line(self.submission_id)!r}, which sends no task twice",
                self,
            )
        if self.failed:
            first = one_line(self.errors[0]) if self.errors else "no reason was given"
            others = ", the others were" if self.sent else ""
            raise SubmitFailed(
                f"{self.failed:,} of {self.rows:,} rows could not be sent{others} ({first}); "
                "correct these rows and submit again under the submission id "
                f"{one_line(self.submission_id)!r}",
                self,
            )

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        plain = asdict(replace(self, plan=None))
        del plain["plan"]
        return {**plain, "seconds": round(self.seconds, 3), "errors": list(self.errors)}

    def join(
        self, frame: DataFrame, *, schema: str | None = None, column: str = RESULT
    ) -> DataFrame:
        """The table that was submitted, with the result of each row beside it.

        frame: that table; other columns and other rows may have come, but not another key column.
        schema: as for `aztask.spark.results`. column: the name of the new column, a struct of what
        `results` shows of a key; it is null where the key is null. Each action on the DataFrame
        looks all keys up again. Raises ConfigurationError.
        """
        if self.plan is None:
            raise ConfigurationError("this report is of no submission of this program")
        plan = self.plan
        place = {"app": plan.app, "broker": plan.broker, "broker_env": plan.broker_env}
        target = Target(**{name: value for name, value in place.items() if value})
        return beside(frame, plan.submission_id, plan.key, schema, target, column)


class SubmitOptions(TypedDict, total=False):
    """The options of ``submit`` besides table, task and ids.

    queue: instead of the task's own.
    columns: the arguments, as a list of columns or {parameter: column}; by default all columns, the
        key only if the task takes it.
    app: ``module:app``, which executors can import; by default the app of the given task.
    broker: instead of an app, an address without a key.
    broker_env: instead of both, the executors' environment variable that holds the address.
    rate: messages per second in total; the rows are then spread evenly over `writers` partitions.
    writers: see rate; by default the number of cores.
    delay, expires: seconds or a ``timedelta``, counted from when each row is sent.
    patience: how long a busy or unreachable service may answer nothing before the job fails, in
        seconds or as a ``timedelta``.
    """

    queue: str | None
    columns: Mapping[str, str] | Sequence[str] | None
    app: str | None
    broker: str | None
    broker_env: str | None
    rate: float | None
    writers: int | None
    delay: float | timedelta
    expires: float | timedelta | None
    patience: float | timedelta


def submit(
    df: DataFrame,
    task: Task[..., Any] | str,
    *,
    key: str,
    submission_id: str,
    check_keys: bool = True,
    dry_run: bool = False,
    manifest: str | None = None,
    progress: Callable[[str], None] = lambda step: None,
    **options: Unpack[SubmitOptions],
) -> SubmitReport:
    """Send one invocation of `task` for each row.

    task: a task, or its name.
    key: a column with unique values and without nulls.
    submission_id: a name, the same in each rerun. It makes the task ids, together with the key
        (`aztask.spark.task_id`).
    check_keys: whether to check first, with a job over these columns, that no key is null or
        repeats, and that no argument is null that takes no None and has no default. Without the
        check each such null fails its own row, and of two rows with one key one is dropped.
    dry_run: do everything but the sending.
    manifest: a folder; the keys and task ids are added to Parquet files in it before anything is
        sent, for `aztask.spark.results`. It costs a job over the key column.
    progress: called with the name of each step before it starts.
    options: see `SubmitOptions`.

    Raises ConfigurationError (nothing was sent), SubmitFailed (see its `report`), and the broker's
    QueueNotFound and BrokerUnavailable.
    """
    if not submission_id:
        raise ConfigurationError(
            "submission_id is empty: choose a name, and use it again in a rerun"
        )
    if df.isStreaming:
        raise ConfigurationError("this table is a stream: use aztask.spark.stream")
    plan = planned(df, task, key=key, submission_id=submission_id, options=options, dry_run=dry_run)
    try:
        return _run(df, plan, check=check_keys, manifest=manifest, progress=progress)
    except SPARK_ERRORS as error:
        raise as_ours(error) from error


def planned(
    df: DataFrame,
    task: Task[..., Any] | str,
    *,
    key: str,
    submission_id: str,
    options: SubmitOptions,
    **about: Any,
) -> Submission:
    """The submission, checked against table and task. Raises ConfigurationError, UnknownTask."""
    check_options(options, SubmitOptions, "a submission")
    given: dict[str, Any] = {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in options.items()
    }
    given.update(about, columns=pairs_of(options.get("columns")))
    if not any(given.get(place) for place in ("app", "broker", "broker_env")):
        given["app"] = _home_of(task)
    elif not given.get("app") and not isinstance(task, str):
        _check_writable_without(task)
    name = task if isinstance(task, str) else task.name
    requested = Submission(task=name, key=key, submission_id=submission_id, **given)
    app = requested.open_app()
    plan = matched(requested, df.schema, app, None if isinstance(task, str) else task)
    if plan.rate is None:
        return plan
    _check_speculation(df.sparkSession)
    return replace(plan, writers=plan.writers or cores(df.sparkSession))


def _run(
    df: DataFrame,
    plan: Submission,
    *,
    check: bool,
    manifest: str | None,
    progress: Callable[[str], None],
) -> SubmitReport:
    """Check the keys, send the rows, and compare Spark's row count with the messages sent."""
    began = time.monotonic()
    if check:
        progress("checking the keys")
        check_keys(df, plan.key, _needed(plan))
    if manifest is not None and not plan.dry_run:
        progress("writing the manifest")
        write_manifest(selected(df, [plan.key]), manifest, plan.submission_id)
    progress("encoding" if plan.dry_run else "sending")
    names = list(dict.fromkeys([plan.key, *(name for _, name in plan.columns or ())]))
    frame = selected(df, names)
    if plan.rate is not None:
        frame = frame.repartition(plan.writers or 1)
    observed = Observation()
    frame = frame.observe(observed, F.count(F.lit(1)).alias("rows"))
    rows = frame.mapInArrow(partial(send_batches, plan, names), REPORT_SCHEMA).collect()
    report = SubmitReport.of(
        (PartitionReport(**row.asDict()) for row in rows),
        rows=int(observed.get["rows"]),
        submission_id=plan.submission_id,
        task=plan.task,
        queue=plan.queue or "",
        seconds=time.monotonic() - began,
        checked=check,
        dry_run=plan.dry_run,
        plan=plan,
    )
    report.check()
    return report


def _needed(plan: Submission) -> list[tuple[str, str]]:
    """(column, what it is needed for) of each column whose nulls cannot be sent."""
    columns = dict(plan.columns or ())
    return [
        (columns[parameter], f"task {plan.task!r} takes {parameter}: {annotation}")
        for parameter, annotation in plan.nulls
        if annotation
    ]


def _home_of(task: Task[..., Any] | str) -> str | None:
    """``module:app`` of a task, if executors can import it; None for a task's name."""
    if isinstance(task, str):
        return None
    module = task.function.__module__
    for name, value in vars(sys.modules.get(module, sys)).items():
        if isinstance(value, App) and value.tasks.get(task.name) is task and module != "__main__":
            return f"{module}:{name}"
    raise ConfigurationError(
        f"executors cannot import the app of task {task.name!r} from {module}: put app and task "
        "into a module that is shipped to them and name it, app='module:app', or name the broker "
        "with broker= or broker_env="
    )


def _check_writable_without(task: Task[..., Any]) -> None:
    """Raise ConfigurationError if only the app itself can write messages for the task.

    Executors that do not import the app use the default serializer and have no keys.
    """
    codec: Codec | None = getattr(task.sender, "codec", None)
    if codec is not None and (codec.customized or codec.serializer != Codec().serializer):
        raise ConfigurationError(
            f"the app of task {task.name!r} has keys, argsrepr=True or its own serializer, which "
            "executors get only by importing it: name it, app='module:app'"
        )


def _check_speculation(session: SparkSession) -> None:
    if session.conf.get("spark.speculation", "false") == "true":
        raise ConfigurationError(
            "spark.speculation=true runs copies of slow tasks, so a rate cannot be kept: switch it "
            "off, or submit without a rate"
        )
