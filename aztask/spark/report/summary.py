"""The statistics of a place as one plain value, for the terminal, ``--json`` and the report.

Layout (documented in docs/how-to/spark/reports.md): place, accuracy, counts, total, tasks, queues,
queue_hours, errors, timeline, signatures, workers, comparisons, advice, workflows.
The rows are those of `aztask.spark.events.statistics` and of the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pyspark.sql import DataFrame

from aztask.spark.events.frame import Events
from aztask.spark.events.lengths import INTERVAL_RUNS, LEVELS, run_lengths
from aztask.spark.events.statistics import ACCURACY, SHARES, Statistics, plain, statistics
from aztask.spark.events.workflows import longest_workflows
from aztask.spark.report.advice import advise
from aztask.spark.report.comparison import compare, spans_of
from aztask.spark.report.troubles import signatures, workers
from aztask.support.display import plural

STEPS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400),
    *(604800, 2592000),
)
"""Lengths in seconds that one step of a timeline may have."""
MAX_STEPS: Final = 96
MAX_ERRORS: Final = 200
MOST_WORKFLOWS: Final = 10

Row = dict[str, Any]

_KEYS: Final = {
    "task": ("task",),
    "queue": ("queue",),
    "queue_hour": ("queue", "hour"),
    "total": (),
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Rows of figures as plain values.

    timeline: one row for each step of `step_seconds`. total: None without events. counts: as in
    `aztask.spark.EventCounts`. signatures, workers: as in `aztask.spark.report.troubles`.
    run_classes: the tasks with two classes of runs. unaccounted: by task, the runs that the result
    store knows and the log lacks; None if it was not asked. comparisons: as in
    `aztask.spark.report.comparison.compare`. advice: as in
    `aztask.spark.report.advice.advise`; None without the details that it needs. workflows: as in
    `aztask.spark.events.workflows.longest_workflows`.
    """

    place: str
    counts: Row
    total: Row | None
    tasks: list[Row]
    queues: list[Row]
    queue_hours: list[Row]
    errors: list[Row]
    timeline: list[Row]
    step_seconds: int
    accuracy: int = ACCURACY
    signatures: list[Row] = field(default_factory=list)
    workers: list[Row] = field(default_factory=list)
    run_classes: list[Row] = field(default_factory=list)
    unaccounted: list[Row] | None = None
    comparisons: list[Row] = field(default_factory=list)
    advice: list[Row] | None = None
    workflows: list[Row] = field(default_factory=list)

    def as_dict(self) -> Row:
        """The fields as plain data, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def summarize(
    events: Events,
    *,
    progress: Callable[[str], None] = lambda text: None,
    details: bool = True,
    unaccounted: Callable[[DataFrame], list[Row]] | None = None,
    period: float | None = None,
    deploy: float | None = None,
) -> Summary:
    """Run the statistics over the events of a place. Runs a handful of Spark jobs.

    progress: called with a line of text before each step. details: also signatures, workers,
    comparisons, advice and workflows, which read the events five times more. unaccounted: what
    compares the events with a result store. period, deploy: as in
    `aztask.spark.report.comparison.spans_of`; one of them asks for the comparisons without other
    details. Raises ConfigurationError if the deploy is not within the log.
    """
    progress(f"checking for duplicates in {events.files:,} files ({events.bytes / 1e6:,.0f} MB)")
    counts = events.counts.as_dict()
    progress(f"statistics of {counts['events']:,} events")
    figures = statistics(events.events)
    try:
        summary = _summary(str(events.place), counts, figures)
        total = summary.total or {"first_ts": 0.0, "last_ts": 0.0}
        # Before the other jobs: a deploy outside the log is an error of the caller.
        spans = spans_of(total["first_ts"], total["last_ts"], period=period, deploy=deploy)
        lengths = run_lengths(events.events, summary.step_seconds)
        _add_lengths(summary, lengths.rows)
        summary.run_classes.extend(map(asdict, lengths.classes))
        if details and summary.total:
            progress("errors and workers")
            summary.signatures.extend(signatures(events.events))
            summary.workers.extend(workers(events.events))
            progress("workflows")
            summary.workflows.extend(longest_workflows(events.events, MOST_WORKFLOWS))
        if details or period is not None or deploy is not None:
            progress("comparing with the period before")
            summary.comparisons.extend(compare(events.events, spans))
        if details and summary.total:
            summary = replace(summary, advice=advise(summary.as_dict()))
        if unaccounted is None:
            return summary
        progress("comparing with the result store")
        return replace(summary, unaccounted=unaccounted(events.events))
    finally:
        figures.close()


def _summary(place: str, counts: Row, figures: Statistics) -> Summary:
    levels = figures.collect()
    total = next((row for row in levels["total"] if row["events"]), None)
    step = step_of(total["last_ts"] - total["first_ts"]) if total else STEPS[0]
    return Summary(
        place,
        counts,
        total,
        levels["task"],
        levels["queue"],
        levels["queue_hour"],
        plain(figures.errors.limit(MAX_ERRORS)) if total else [],
        plain(figures.over_time(step)) if total else [],
        step,
    )


def _add_lengths(summary: Summary, lengths: list[Row]) -> None:
    """Add to each task, queue, queue and hour, step and the total what `run_lengths` found.

    Where runs were cut off, the percentiles are its estimates, the mean is unknown and the longest
    run is the longest that is known. Otherwise the exact figures stay, and the intervals are added
    below `INTERVAL_RUNS`.
    """
    names = ("level", "task", "queue", "hour", "at")
    found = {tuple(row[name] for name in names): row for row in lengths}
    levels = {
        "task": summary.tasks,
        "queue": summary.queues,
        "queue_hour": summary.queue_hours,
        "total": [summary.total] if summary.total else [],
    }
    for level, rows in levels.items():
        for row in rows:
            keys = [row.get(name) if name in _KEYS[level] else None for name in names[1:]]
            _put(row, found.get((LEVELS[level], *keys), {}))
    for row in summary.timeline:
        its = found.get((LEVELS["step"], None, None, None, row["at"]), {})
        row["run_cut_off"] = its.get("run_cut_off", 0)
        if its:
            row["run"] = [its["run_p50"], its["run_p99"]]
            row["run_longest"] = its["run_longest"]


def _put(row: Row, its: Row) -> None:
    """Add to a row of figures its row of `run_lengths`; {} where no run was measured."""
    cut = its.get("run_cut_off", 0)
    few = its.get("run_ended", 0) + cut < INTERVAL_RUNS
    row["run_cut_off"] = cut
    for share in SHARES:
        for end in ("low", "high"):
            row[f"run_{share}_{end}"] = its.get(f"run_{share}_{end}") if few else None
        if cut:
            row[f"run_{share}"] = its[f"run_{share}"]
    if cut:
        row["run_mean"], row["run_max"] = None, its["run_longest"]


def shown_run(row: Row, share: str, form: Callable[[float], str]) -> str:
    """A percentile of runs for people: ``~`` an estimate, ``>`` beyond the longest run known."""
    value, low, high = (row.get(f"run_{share}{end}") for end in ("", "_low", "_high"))
    cut = row.get("run_cut_off")
    if value is None:
        return f"> {form(row['run_max'])}" if cut else ""
    text = f"~{form(value)}" if cut else form(value)
    if low is None and high is None:
        return text
    ends = (form(low) if low is not None else "?", form(high) if high is not None else "?")
    return f"{text} ({' to '.join(ends)})"


def remarks(summary: Summary, form: Callable[[float], str]) -> list[str]:
    """What the figures alone do not say, in sentences: classes of runs, unaccounted runs."""
    found = [
        f"{row['task']} has two classes of runs: {row['short_runs']:,} of about "
        f"{form(row['short_p50'])} and {row['long_runs']:,} of about {form(row['long_p50'])}; a "
        "queue for each lets leases and waits fit"
        for row in summary.run_classes
    ]
    found += [
        f"{row['task']}: {plural(row['runs'], 'run')} unaccounted, which the result store "
        f"knows and the log lacks, such as {row['example']}"
        for row in summary.unaccounted or []
    ]
    return found


def step_of(span: float) -> int:
    """The shortest step that divides a span of seconds into at most `MAX_STEPS` steps."""
    return next((step for step in STEPS if span / step <= MAX_STEPS), STEPS[-1])
