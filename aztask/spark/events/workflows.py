"""Statistics of workflows from events: how long each took, its critical path, its slowest tasks.

Rules
1. Only events with a ``workflow_id`` count; those of aztask 0.1 have none.
2. A task's runs count together: its run lasts from the first start to the last end, with the delays
   of its retries. ``busy_seconds`` is the time that its code ran.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

# -- the critical path of a workflow: the tasks whose delay would have delayed its end -----
#
# Rules
# 1. The path is walked back from the task that ended last. Before a task comes the one that its
#    event names as its parent. If the parent is a group, the member that ended last comes before
#    it.
# 2. Task ids of a workflow are ``WORKFLOW.NUMBER``, and numbers rise in the order of the graph: the
#    tasks of a group have numbers between the group's own and that of the task which waits for it
#    (`aztask.workflows.compiler`). So the walk ends, whatever the events say.


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """A task of a workflow, all its runs together. Times are seconds since 1970.

    * `parent`: the id of the task or group before it, or None.
    * `started`: of its first run, None if no event has it; `ended`: of its last one.
    """

    task_id: str
    parent: str | None
    started: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class PathStep:
    """One task of a critical path.

    * `wait_seconds`: from the end of the step before it to its start; 0 for the first step.
    * `run_seconds`: from its first start to its last end, with the delays of its retries.
    """

    task_id: str
    wait_seconds: float
    run_seconds: float


def critical_path(workflow: str, tasks: Iterable[TaskTimes]) -> list[PathStep]:
    """The steps of one workflow's critical path, the first task first.

    tasks: those that have ended.
    """
    found = {number: each for each in tasks if (number := _number(workflow, each.task_id))}
    numbers = sorted(found)
    path: list[TaskTimes] = []
    number = max(numbers, key=lambda each: found[each].ended, default=None)
    while number is not None:
        task = found[number]
        path.append(task)
        parent = _number(workflow, task.parent or "")
        if parent is None or parent >= number:
            break
        if parent in found:
            number = parent
        else:
            members = numbers[bisect_right(numbers, parent) : bisect_left(numbers, number)]
            number = max(members, key=lambda each: found[each].ended, default=None)
    return _steps(path[::-1])


def _number(workflow: str, task_id: str) -> int | None:
    """The number of a node in its task id; None for another workflow's task."""
    name, _, number = task_id.rpartition(".")
    return int(number) if name == workflow and number.isascii() and number.isdigit() else None


def _steps(path: list[TaskTimes]) -> list[PathStep]:
    steps: list[PathStep] = []
    before: float | None = None
    for task in path:
        start = task.ended if task.started is None else min(task.started, task.ended)
        # clocks of two machines may differ: a wait is never shown as negative
        wait = 0.0 if before is None else max(0.0, start - before)
        steps.append(PathStep(task.task_id, wait, task.ended - start))
        before = task.ended
    return steps


PATH_STEPS: Final = 10
"""Steps of a critical path that `longest_workflows` gives, those that took longest."""
ENDS: Final = ("succeeded", "failed", "cancelled", "expired", "dead_lettered")
RAN: Final = ("succeeded", "failed", "resubmitted", "snoozed", "waiting")
PATH: Final = pa.schema(
    [
        ("workflow_id", pa.string()),
        ("step", pa.int64()),
        ("task_id", pa.string()),
        ("wait_seconds", pa.float64()),
        ("run_seconds", pa.float64()),
    ]
)
PATH_DDL: Final = (
    "workflow_id STRING, step BIGINT, task_id STRING, wait_seconds DOUBLE, run_seconds DOUBLE"
)


@dataclass(frozen=True, slots=True)
class WorkflowStatistics:
    """Figures of workflows as DataFrames. Times are seconds since 1970.

    tasks: one row for each task of a workflow: workflow_id, task_id, task, queue, parent_id, state
    (null while it has not ended), runs, started_at, ended_at, run_seconds, busy_seconds.
    """

    tasks: DataFrame

    @property
    def workflows(self) -> DataFrame:
        """One row per workflow, the longest first, with its slowest task.

        workflow_id, tasks, runs, failed, started_at, ended_at, seconds, busy_seconds,
        slowest_task_id, slowest_task, slowest_seconds.
        """
        slowest = F.max_by(F.struct("task_id", "task", "run_seconds"), "run_seconds")
        summed = self.tasks.groupBy("workflow_id").agg(
            F.count("*").alias("tasks"),
            F.sum("runs").alias("runs"),
            F.count(F.when(F.col("state").isin("failed", "expired"), 1)).alias("failed"),
            F.min("first_ts").alias("started_at"),
            F.max("ended_at").alias("ended_at"),
            F.sum("busy_seconds").alias("busy_seconds"),
            slowest.alias("slowest"),
        )
        return summed.select(
            *("workflow_id", "tasks", "runs", "failed", "started_at", "ended_at"),
            (F.col("ended_at") - F.col("started_at")).alias("seconds"),
            "busy_seconds",
            F.col("slowest.task_id").alias("slowest_task_id"),
            F.col("slowest.task").alias("slowest_task"),
            F.col("slowest.run_seconds").alias("slowest_seconds"),
        ).orderBy(F.desc_nulls_last("seconds"), "workflow_id")

    @property
    def critical_paths(self) -> DataFrame:
        """The steps of each workflow's critical path, in order.

        workflow_id, step (from 1), task_id, task, wait_seconds, run_seconds, busy_seconds, runs,
        state.
        """
        ended = self.tasks.where(F.col("ended_at").isNotNull())
        steps = ended.groupBy("workflow_id").applyInArrow(_path, PATH_DDL)
        known = self.tasks.select("workflow_id", "task_id", "task", "busy_seconds", "runs", "state")
        return (
            steps.join(known, ["workflow_id", "task_id"])
            .select(
                *("workflow_id", "step", "task_id", "task"),
                *("wait_seconds", "run_seconds", "busy_seconds", "runs", "state"),
            )
            .orderBy("workflow_id", "step")
        )

    def slowest(self, count: int) -> DataFrame:
        """The `count` tasks of each workflow that ran longest, the longest first."""
        order = Window.partitionBy("workflow_id").orderBy(
            F.desc_nulls_last("run_seconds"), "task_id"
        )
        ranked = self.tasks.withColumn("rank", F.row_number().over(order))
        return ranked.where(F.col("rank") <= count).orderBy("workflow_id", "rank").drop("first_ts")


def workflow_statistics(events: DataFrame, workflow_id: str | None = None) -> WorkflowStatistics:
    """The statistics of workflows. Lazy: each frame's use runs a job.

    events: each event once, as `read_events` gives them. workflow_id: only of this workflow.
    """
    chosen = events.where(F.col("workflow_id").isNotNull() & (F.col("task_id") != ""))
    if workflow_id is not None:
        chosen = chosen.where(F.col("workflow_id") == workflow_id)
    kind = F.col("event")
    ended = F.when(kind.isin(*ENDS), F.col("ts"))
    tasks = chosen.groupBy("workflow_id", "task_id").agg(
        F.max("task").alias("task"),
        F.max("queue").alias("queue"),
        F.max("parent_id").alias("parent_id"),
        _state(kind).alias("state"),
        F.count(F.when(kind.isin(*RAN), 1)).alias("runs"),
        F.min("ts").alias("first_ts"),
        F.min(F.when(kind == "started", F.col("ts"))).alias("started_at"),
        F.max(ended).alias("ended_at"),
        F.sum(F.when(kind.isin(*RAN), F.col("duration_seconds"))).alias("busy_seconds"),
    )
    lasted = F.greatest(F.lit(0.0), F.col("ended_at") - F.col("started_at"))
    return WorkflowStatistics(tasks.withColumn("run_seconds", lasted))


def longest_workflows(events: DataFrame, count: int) -> list[dict[str, Any]]:
    """The workflows that took longest, with what their critical paths consist of. Runs two jobs.

    Rows of `WorkflowStatistics.workflows`, the longest first, with the sums over the steps of the
    path: steps, wait_seconds (between steps), ran_seconds (in which code ran), between_seconds
    (delays between a step's runs, and runs that told no end); and path: of the `PATH_STEPS` steps
    that took longest, in order, step, task_id, task, wait_seconds, ran_seconds, between_seconds,
    runs and state.
    """
    known = workflow_statistics(events).workflows.where(F.col("seconds").isNotNull())
    rows = [row.asDict() for row in known.limit(count).collect()]
    if not rows:
        return []
    names = [row["workflow_id"] for row in rows]
    # Only these are walked: a path needs all tasks of its workflow on one executor.
    chosen = workflow_statistics(events.where(F.col("workflow_id").isin(names)))
    # What a worker measured may be longer than what its events are apart, by a little.
    ran = F.least("run_seconds", F.coalesce(F.col("busy_seconds"), F.lit(0.0)))
    took = F.col("wait_seconds") + F.col("run_seconds")
    longest = Window.partitionBy("workflow_id").orderBy(took.desc(), "step")
    steps = chosen.critical_paths.select(
        "*",
        ran.alias("ran_seconds"),
        # Times of events are rounded to microseconds: what is shorter than ten is no delay.
        F.round(F.col("run_seconds") - ran, 5).alias("between_seconds"),
        F.row_number().over(longest).alias("rank"),
    )
    parts = ("wait_seconds", "ran_seconds", "between_seconds")
    step = F.struct("step", "task_id", "task", *parts, "runs", "state")
    paths = steps.groupBy("workflow_id").agg(
        F.count("*").alias("steps"),
        *(F.sum(part).alias(part) for part in parts),
        F.array_sort(F.collect_list(F.when(F.col("rank") <= PATH_STEPS, step))).alias("path"),
    )
    found = {row["workflow_id"]: row.asDict(recursive=True) for row in paths.collect()}
    return [{**row, **found[row["workflow_id"]]} for row in rows]


def _state(kind: Column) -> Column:
    """How a task ended. A dead letter comes with the event "failed" or is one without a run."""
    last = F.max_by(
        F.when(kind == "dead_lettered", "failed").otherwise(kind),
        F.when(kind.isin(*ENDS), F.col("ts")),
    )
    return F.when(F.max(kind.isin(*ENDS)), last)


def _path(group: pa.Table) -> pa.Table:
    """The critical path of the tasks of one workflow; for ``applyInArrow``."""
    columns = group.select(["task_id", "parent_id", "started_at", "ended_at"]).to_pydict()
    workflow = group.column("workflow_id")[0].as_py()
    steps = critical_path(workflow, map(TaskTimes, *columns.values()))
    return pa.table(
        [
            [workflow] * len(steps),
            list(range(1, len(steps) + 1)),
            [each.task_id for each in steps],
            [each.wait_seconds for each in steps],
            [each.run_seconds for each in steps],
        ],
        schema=PATH,
    )
