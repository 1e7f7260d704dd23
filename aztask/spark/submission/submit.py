"""``submit(df, task, ...)``: every row of a DataFrame becomes one task, once.

Crash window: a job that dies half-way has sent some of its rows. Submitted again under the same
submission id, all rows are sent once more under the same task ids; workers with a result store run
each id once, for as long as results are kept. Without a result store, what was sent twice runs
twice (unless it falls into the duplicate detection of a Service Bus queue).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from aztask.app import App
from aztask.errors import ConfigurationError
from aztask.message.codec import Codec
from aztask.spark.failures import SPARK_ERRORS, as_ours
from aztask.spark.submission.keys import check_keys as check_the_keys
from aztask.spark.submission.keys import column
from aztask.spark.submission.matching import matched
from aztask.spark.submission.report import SubmitReport
from aztask.spark.submission.send import REPORT_SCHEMA, PartitionReport, send_batches
from aztask.spark.submission.submission import Submission, pairs_of
from aztask.task import Task, check_options


class SubmitOptions(TypedDict, total=False):
    """What ``submit`` takes beside table, task and ids.

    queue: instead of the task's own. columns: which are the arguments, a list or {parameter:
    column}; by default all that there are (the key only if the task takes it). app: ``module:app``,
    which executors can import; found out where the task is given as such. broker: instead of an
    app, an address without a key; broker_env: instead of it, the executors' environment variable
    that holds the address. rate: messages a second in all; the rows are then spread evenly over
    `writers` partitions (by default as many as there are cores). delay, expires: seconds, as in
    ``with_options``. patience: seconds without success after which a busy or missing service fails
    the job.
    """

    queue: str | None
    columns: Mapping[str, str] | Sequence[str] | None
    app: str | None
    broker: str | None
    broker_env: str | None
    rate: float | None
    writers: int | None
    delay: float
    expires: float | None
    patience: float


def submit(
    df: DataFrame,
    task: Task[..., Any] | str,
    *,
    key: str,
    submission_id: str,
    check_keys: bool = True,
    dry_run: bool = False,
    **options: Unpack[SubmitOptions],
) -> SubmitReport:
    """Send one invocation of `task` for each row.

    task: a task, or its name. key: the column that makes the task ids, unique and without nulls;
    submission_id: the same in each rerun. Both together make the ids (`aztask.spark.task_id`).
    check_keys: whether nulls and duplicates are looked for first, at the price of a job over the
    key column. dry_run: everything but the sending. options: see `SubmitOptions`.

    Raises ConfigurationError (nothing was sent), SubmitFailed (`report` says more), and what the
    broker raises: QueueNotFound, BrokerUnavailable.
    """
    if not submission_id:
        raise ConfigurationError("submission_id is empty: give a name that a rerun gives again")
    if df.isStreaming:
        raise ConfigurationError("this table is a stream: use aztask.spark.stream for it")
    plan = planned(df, task, key=key, submission_id=submission_id, options=options, dry_run=dry_run)
    try:
        return _run(df, plan, check=check_keys)
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
    given: dict[str, Any] = {**options, "columns": pairs_of(options.get("columns")), **about}
    if not any(given.get(place) for place in ("app", "broker", "broker_env")):
        given["app"] = _home_of(task)
    elif not given.get("app") and not isinstance(task, str):
        _check_writable_without(task)
    name = task if isinstance(task, str) else task.name
    wish = Submission(task=name, key=key, submission_id=submission_id, **given)
    home = wish.open_app()
    plan = matched(wish, df.schema, home, None if isinstance(task, str) else task)
    if plan.rate is None:
        return plan
    _check_speculation(df.sparkSession)
    return replace(plan, writers=plan.writers or _cores(df.sparkSession))


def _run(df: DataFrame, plan: Submission, *, check: bool) -> SubmitReport:
    """Check the keys, send, and reconcile."""
    began = time.monotonic()
    if check:
        check_the_keys(df, plan.key)
    names = dict.fromkeys([plan.key, *(name for _, name in plan.columns or ())])
    frame = df.select([column(name) for name in names])
    if plan.rate is not None:
        frame = frame.repartition(plan.writers or 1)
    seen = Observation()
    frame = frame.observe(seen, F.count(F.lit(1)).alias("rows"))
    rows = frame.mapInArrow(partial(send_batches, plan), REPORT_SCHEMA).collect()
    report = SubmitReport.of(
        (PartitionReport(**row.asDict()) for row in rows),
        rows=int(seen.get["rows"]),
        submission_id=plan.submission_id,
        task=plan.task,
        queue=plan.queue or "",
        seconds=time.monotonic() - began,
        checked=check,
        dry_run=plan.dry_run,
    )
    report.check()
    return report


def _home_of(task: Task[..., Any] | str) -> str | None:
    """``module:app`` of a task, where executors can import it; None for a name."""
    if isinstance(task, str):
        return None
    module = task.function.__module__
    for name, value in vars(sys.modules.get(module, sys)).items():
        if isinstance(value, App) and value.tasks.get(task.name) is task and module != "__main__":
            return f"{module}:{name}"
    raise ConfigurationError(
        f"executors cannot import the app of task {task.name!r} from {module}: put app and task "
        "into a module that is shipped to them and name it, app='module:app', or say where the "
        "queues are with broker= or broker_env="
    )


def _check_writable_without(task: Task[..., Any]) -> None:
    """Executors that do not import the app write what every worker reads, and sign nothing."""
    codec: Codec | None = getattr(task.sender, "codec", None)
    if codec is not None and (codec.signs or codec.serializer != Codec().serializer):
        raise ConfigurationError(
            f"the app of task {task.name!r} signs its messages or has a serializer of its own, "
            "which executors know from the app alone: name it, app='module:app'"
        )


def _cores(session: SparkSession) -> int:
    try:
        return int(session.sparkContext.defaultParallelism)
    except PySparkException as error:
        raise ConfigurationError(
            "how many cores there are cannot be asked here: give writers=, the number of "
            "partitions that shall send at the same time"
        ) from error


def _check_speculation(session: SparkSession) -> None:
    if session.conf.get("spark.speculation", "false") == "true":
        raise ConfigurationError(
            "a rate cannot be kept with spark.speculation=true, which runs copies of slow tasks: "
            "switch it off, or submit without a rate"
        )
