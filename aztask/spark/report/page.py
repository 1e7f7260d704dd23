"""The report: one HTML file that needs nothing else, for a person to read.

Rules
1. It loads nothing: no script, font, image or style from anywhere, and its own policy forbids it.
2. Names from events (tasks, queues, errors) are text: Jinja2 escapes every value that a template
   shows (autoescape), and `clean` keeps names on one line and cuts them.
3. Colour never says anything alone: a word or a number says it too.
4. The words of the page are in ``templates/``; this module computes what they show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from aztask.spark.events.statistics import SHARES
from aztask.spark.report import charts
from aztask.spark.report.charts import (
    Chart,
    clean,
    coordinate,
    count,
    moment,
    per_second,
    seconds,
    sentence,
    share,
)
from aztask.spark.report.comparison import FIGURES, LEVELS_COMPARED, shown
from aztask.spark.report.summary import Summary, remarks, shown_run
from aztask.version import __version__

MAX_CHART_ROWS: Final = 20
"""Rows of a chart; the tables show all rows, up to `MAX_TABLE_ROWS`."""
MAX_TABLE_ROWS: Final = 500

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Card:
    """A figure at the top. level: ``good``, ``warn``, ``poor`` or none; `text` says it in words."""

    name: str
    value: str
    text: str
    level: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its heading, a row's text, and the CSS class of a row's cell."""

    heading: str
    text: Callable[[Row], str]
    style: Callable[[Row], str] = lambda row: ""


@dataclass(frozen=True, slots=True)
class Table:
    """The texts of a table, each cell with its CSS class.

    key: the heading of the first column, which names the row. hidden: rows that are not shown.
    """

    key: str
    headings: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    hidden: int = 0


def _workflows(summary: Summary) -> Table:
    """The workflows that took longest, and on what."""
    parts = {"ran": "ran_seconds", "between runs": "between_seconds", "waited": "wait_seconds"}
    columns = [
        Column("took", lambda row: seconds(row["seconds"])),
        Column("tasks", lambda row: count(row["tasks"])),
        Column("on the path", lambda row: count(row["steps"])),
        *(_part_column(heading, name) for heading, name in parts.items()),
        Column("failed", lambda row: count(row["failed"]), _marked("failed", 1, 1e9)),
    ]
    return _table("workflow_id", summary.workflows, columns)


def _part_column(heading: str, name: str) -> Column:
    def text(row: Row) -> str:
        whole = sum(row[each.column] for each in charts.PATH_PARTS)
        return f"{seconds(row[name])} ({share(row[name] / whole)})" if whole else seconds(row[name])

    return Column(heading, text)


def _paths(summary: Summary) -> Table:
    """The steps of their critical paths that took longest."""
    columns = [
        Column("step", lambda row: count(row["step"])),
        Column("task", lambda row: clean(row["task"]), lambda row: "text"),
        Column("waited before", lambda row: seconds(row["wait_seconds"])),
        Column("ran", lambda row: seconds(row["ran_seconds"])),
        Column("between runs", lambda row: seconds(row["between_seconds"])),
        Column("runs", lambda row: count(row["runs"])),
        Column("state", lambda row: clean(row["state"]), lambda row: "text"),
    ]
    rows = [step for workflow in summary.workflows for step in workflow["path"]]
    return _table("task_id", rows, columns)


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison: what is beside what, a table of queues and one of tasks."""

    title: str
    text: str
    tables: Sequence[Table]


def render(summary: Summary, *, made_at: float | None = None) -> str:
    """The page as HTML. made_at: seconds since 1970; None: now."""
    busiest = busiest_tasks(summary)
    return (
        _environment()
        .get_template("page.html")
        .render(
            place=clean(summary.place),
            made_at=time.time() if made_at is None else made_at,
            total=summary.total,
            counts=summary.counts,
            step_seconds=summary.step_seconds,
            accuracy=summary.accuracy,
            version=__version__,
            outcomes=charts.OUTCOMES,
            cards=_cards(summary.total) if summary.total else [],
            advice=summary.advice,
            path_parts=charts.PATH_PARTS,
            workflows=_workflows(summary),
            paths=_paths(summary),
            charts=_charts(summary, busiest),
            busiest=f" The {MAX_CHART_ROWS} busiest tasks."
            if len(busiest) == MAX_CHART_ROWS
            else "",
            troubled=_troubled(summary),
            errors=_errors(summary),
            workers=_workers(summary),
            comparisons=[_compared(each) for each in summary.comparisons],
            remarks=remarks(summary, seconds),
            tasks=_numbers("task", summary.tasks),
            queues=_numbers("queue", summary.queues),
        )
    )


@cache
def _environment() -> Environment:
    """The templates, which `PackageLoader` also finds in a zip of the package."""
    environment = Environment(
        loader=PackageLoader("aztask.spark.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    filters = (clean, coordinate, count, moment, seconds, sentence)
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def busiest_tasks(summary: Summary) -> list[Row]:
    """The tasks that the charts show: those with the most runs first."""
    busiest = sorted(summary.tasks, key=lambda row: (-row["runs"], row["task"]))
    return [row for row in busiest if row["runs"]][:MAX_CHART_ROWS]


def _charts(summary: Summary, busiest: Sequence[Row]) -> dict[str, Chart]:
    queues = sorted(summary.queues, key=lambda row: (-row["events"], row["queue"]))
    queues = queues[:MAX_CHART_ROWS]
    timeline, step = summary.timeline, summary.step_seconds
    drawn = (
        charts.outcomes_over_time(timeline, step),
        charts.durations_over_time("Wait over time", timeline, step, "wait"),
        charts.durations_over_time("Run over time", timeline, step, "run"),
        charts.spreads("Run times by task", busiest, "task", "run"),
        charts.outcome_shares(busiest),
        charts.spreads("Waits by queue", queues, "queue", "wait"),
        charts.margins(queues),
        charts.runs_by_hour(summary.queue_hours),
        charts.failures_by_hour(summary.queue_hours),
        charts.critical_paths(summary.workflows),
    )
    return {chart.name: chart for chart in drawn}


def _cards(total: Row) -> list[Card]:
    lost, failed = total["lease_lost"], total["settle_failed"]
    least, lease = total["margin_min"], total["lease_max"]
    close = least is not None and lease is not None and least < 0.1 * lease
    kept = None if total["retry_rate"] is None else total["succeeded"] / total["runs"]
    return [
        Card("Runs", count(total["runs"]), f"{share(kept)} succeeded", _level(kept, 0.95, 0.8)),
        Card("Throughput", per_second(total["throughput"]), "runs over the whole time"),
        _duration_card("Wait", total, "wait"),
        _duration_card("Run", total, "run"),
        Card("Retried", share(total["retry_rate"]), f"{count(total['resubmitted'])} runs"),
        Card(
            "Dead letters",
            count(total["dead_lettered"]),
            f"{share(total['dead_letter_rate'])} of the tasks that ended",
            "poor" if (total["dead_letter_rate"] or 0) > 0.01 else "",
        ),
        Card(
            "Leases lost",
            count(lost),
            f"{share(total['lost_rate'])} of deliveries, {count(failed)} settlements failed",
            "poor" if lost or failed else "good",
        ),
        Card(
            "Least lease left",
            seconds(least),
            f"of {seconds(lease)}, at settlement; {total['renewals_mean'] or 0:.2g} renewals each",
            "warn" if close else "",
        ),
    ]


def _duration_card(name: str, total: Row, measure: str) -> Card:
    high, longest = (seconds(total[f"{measure}_{part}"]) for part in ("p99", "max"))
    return Card(name, seconds(total[f"{measure}_p50"]), f"99 % below {high}, longest {longest}")


def _level(value: float | None, good: float, warn: float) -> str:
    if value is None:
        return ""
    return "good" if value >= good else "warn" if value >= warn else "poor"


def _troubled(summary: Summary) -> Table:
    """The tasks that fail most, each with its most frequent errors."""
    errors: dict[str, list[str]] = {}
    for row in summary.errors:
        errors.setdefault(row["task"], []).append(f"{row['error_type']} ({count(row['runs'])})")
    rows = [row for row in summary.tasks if _problems(row)]
    rows = sorted(rows, key=lambda row: (-_problems(row), row["task"]))[:MAX_CHART_ROWS]
    columns = [
        Column("runs", lambda row: count(row["runs"])),
        Column("retried", lambda row: share(row["retry_rate"]), _marked("retry_rate", 0.05, 0.25)),
        Column("failed", lambda row: count(row["failed"])),
        Column(
            "dead letters",
            lambda row: count(row["dead_lettered"]),
            _marked("dead_letter_rate", 1e-9, 0.01),
        ),
        Column(
            "leases lost",
            lambda row: count(row["lease_lost"]),
            _marked("lease_lost", 1e-9, 1e9),
        ),
        Column("99 % run below", lambda row: shown_run(row, "p99", seconds) or seconds(None)),
        Column(
            "most frequent errors",
            lambda row: clean(", ".join(errors.get(row["task"], ["–"])[:3])),
            lambda row: "text",
        ),
    ]
    return _table("task", rows, columns)


def _errors(summary: Summary) -> Table:
    """The most frequent errors, each with the last one's text."""
    columns = [
        Column("error", lambda row: clean(row["signature"]), lambda row: "text"),
        Column("runs", lambda row: count(row["runs"])),
        Column("first", lambda row: moment(row["first"])),
        Column("last", lambda row: moment(row["last"])),
        Column("the last one", lambda row: clean(row["sample"]), lambda row: "text"),
        Column("task id", lambda row: clean(row["task_id"]), lambda row: "text"),
    ]
    return _table("task", summary.signatures[:MAX_CHART_ROWS], columns)


def _workers(summary: Summary) -> Table:
    """What each worker did, those with the most trouble first."""
    columns = [
        Column("runs", lambda row: count(row["runs"])),
        Column("failed", lambda row: count(row["failed"])),
        Column("retried", lambda row: count(row["retried"])),
        Column("leases lost", lambda row: count(row["lost"]), _marked("lost", 1, 1)),
        Column("silent before", lambda row: seconds(row["silence"]), _marked("silence", 1e-9, 1e9)),
        Column("end not told", lambda row: count(row["untold"]), _marked("untold", 1, 1e9)),
        Column("half run below", lambda row: seconds(row["run_p50"])),
        Column("first event", lambda row: moment(row["first"])),
        Column("last event", lambda row: moment(row["last"])),
    ]
    return _table("worker", summary.workers, columns)


def _compared(comparison: Row) -> Compared:
    """One comparison, the rows with the most marked changes first."""
    begin, split, end = (moment(comparison[name]) for name in ("begin", "split", "end"))
    title = "Before and after the deploy"
    if comparison["about"] == "period":
        title = "This period and the one before it"
    tables = []
    for key in LEVELS_COMPARED:
        rows = sorted(comparison[f"{key}s"], key=lambda row: -len(row["changed"]))
        tables.append(_table(key, rows, [_change_column(name) for name in FIGURES]))
    return Compared(title, f"{begin} to {split}, and {split} to {end} UTC.", tables)


def _change_column(name: str) -> Column:
    # Fewer or more tasks that were done are neither good nor bad.
    return Column(
        name.replace("_", " "),
        lambda row: shown(row, name, seconds),
        lambda row: "warn" if name != "done" and row["changed"].get(name) == "more" else "",
    )


def _problems(row: Row) -> int:
    names = ("failed", "resubmitted", "dead_lettered", "lease_lost", "settle_failed")
    return int(sum(row[name] for name in names))


def _marked(name: str, warn: float, poor: float) -> Callable[[Row], str]:
    def level(row: Row) -> str:
        value = row[name] or 0
        return "poor" if value >= poor else "warn" if value >= warn else ""

    return level


def _numbers(key: str, rows: Sequence[Row]) -> Table:
    """All figures of every task or queue, up to `MAX_TABLE_ROWS` rows."""

    def column(name: str, form: Callable[[Any], str]) -> Column:
        return Column(name.replace("_", " "), lambda row: form(row[name]))

    ended = ("succeeded", "resubmitted", "snoozed", "waiting", "failed")
    kinds = (*ended, "dead_lettered", "lease_lost")
    columns = [
        *(column(name, count) for name in ("runs", *kinds, "settle_failed")),
        *(column(f"wait_{part}", seconds) for part in ("p50", "p90", "p99", "max")),
        Column("cut off", lambda row: count(row.get("run_cut_off", 0))),
        *(_run_column(part) for part in SHARES),
        column("run_max", seconds),
        *(column(f"held_{part}", seconds) for part in ("p50", "p99", "max")),
        *(column(f"margin_{part}", seconds) for part in ("p50", "p10", "p01", "min")),
        column("throughput", per_second),
    ]
    return _table(key, rows, columns)


def _run_column(share: str) -> Column:
    return Column(f"run {share}", lambda row: shown_run(row, share, seconds) or seconds(None))


def _table(key: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    shown = rows[:MAX_TABLE_ROWS]
    return Table(
        key,
        # A heading is aligned like the cells below it.
        [(column.heading, column.style(rows[0]) if rows else "") for column in columns],
        [
            (clean(row[key]), [(column.text(row), column.style(row)) for column in columns])
            for row in shown
        ],
        len(rows) - len(shown),
    )
