"""``aztask spark stats``: statistics of events as tables, as JSON, or as a page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from aztask.errors import ConfigurationError
from aztask.operate.cli.options import Duration, Moment, app_option, json_option
from aztask.operate.cli.output import iso_time, print_json, print_table
from aztask.operate.cli.target import open_app
from aztask.spark.cli.session import SessionOptions, events_options, open_session
from aztask.support.display import plural, visible

COLUMNS = {
    "runs": "runs",
    "ok": "succeeded",
    "retried": "resubmitted",
    "failed": "failed",
    "dead": "dead_lettered",
    "lost": "lease_lost",
    "cut off": "run_cut_off",
    "wait p50": "wait_p50",
    "wait p99": "wait_p99",
    "run p50": "run_p50",
    "run p99": "run_p99",
    "held p99": "held_p99",
    "margin p01": "margin_p01",
}


@click.command("stats")
@app_option
@events_options
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also write a page with charts to this file. The page loads nothing else.",
)
@click.option(
    "--store",
    is_flag=True,
    help="Name runs that the app's result store knows and the events lack, as unaccounted.",
)
@click.option(
    "--store-runs",
    type=click.IntRange(1),
    default=100_000,
    help="With --store: compare so many of the newest runs.",
)
@click.option(
    "--period",
    type=Duration(least=1.0),
    help="Compare the last so long, such as 24h, with as long before. [default: half the log]",
)
@click.option(
    "--deploy",
    type=Moment(),
    help="Compare what was before and after this time, such as 2026-11-30T12:00Z. "
    "Without an offset it is UTC.",
)
@json_option
def command(
    path: str,
    account_variable: str | None,
    html: Path | None,
    store: bool,
    store_runs: int,
    period: float | None,
    deploy: datetime | None,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Show how tasks waited, ran and ended, from their events.

    PATH is a directory, blob://ACCOUNT/CONTAINER, or any path that Spark reads (abfss://, dbfs:/,
    file:///). Waits, runs and margins (the lease left at
    settlement) are in seconds. Counts are exact; percentiles are off by at most 1 rank in 10,000.
    CUT OFF counts runs that were stopped, by a lost lease, a kill or a limit: percentiles with such
    runs are estimates, marked with ~, and what is beyond the longest run is > that. With fewer than
    1,000 runs, a percentile of runs has its 95 % interval.

    --period, --deploy, --html and --json compare two spans of equal length. A change larger than
    chance is marked with more or less.
    """
    from aztask.spark.needs import REPORT_LIBRARIES, check_installed

    if html is not None:
        # Checked now, before Spark works for minutes on figures that could not be written.
        check_installed(REPORT_LIBRARIES)
    with open_session(spark_options, "aztask stats") as spark:
        from aztask.spark import read_events
        from aztask.spark.report.summary import remarks, summarize
        from aztask.spark.session import translated_errors

        with translated_errors():
            events = read_events(spark, path, account_variable=account_variable)
            summary = summarize(
                events,
                progress=lambda text: click.echo(text, err=True),
                details=html is not None or as_json,
                unaccounted=partial(_unaccounted, limit=store_runs) if store else None,
                period=period,
                deploy=_utc(deploy) if deploy is not None else None,
            )
            events.close()
    if html is not None:
        from aztask.spark.report.page import render

        _write(html, render(summary))
        click.echo(f"wrote {visible(str(html))}", err=True)
    if as_json:
        print_json(summary.as_dict())
    else:
        _print(summary.as_dict())
        for text in remarks(summary, _seconds):
            click.echo(visible(text))
        for row in summary.advice or []:
            click.echo(f"{visible(row['text'])}\n    {visible(row['command'])}")


def _unaccounted(events: Any, limit: int) -> list[dict[str, Any]]:
    """By task, the runs that the app's result store knows and the log lacks, and an example."""
    from aztask.spark.events.unaccounted import unaccounted_by_task

    with open_app(reads=True) as app:
        if app.results is None:
            raise ConfigurationError(
                "--store compares with the result store: name it with -A or AZTASK_RESULTS"
            )
        return unaccounted_by_task(events, app.results, limit=limit)


def _utc(moment: datetime) -> float:
    """Seconds since 1970; the log's times are UTC, and so is one without an offset."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{visible(str(path))} cannot be written: {error.strerror}"
        ) from None


def _print(summary: dict[str, Any]) -> None:
    for key, rows in (("task", summary["tasks"]), ("queue", summary["queues"])):
        if rows:
            print_table([key, *COLUMNS], [_cells(key, row) for row in rows])
            click.echo()
    for comparison in summary["comparisons"]:
        _print_comparison(comparison)
    counts = summary["counts"]
    notes = [f"{number:,} × {what}" for what, number in counts["odd"].items()]
    notes += [f"not read: {number:,} × {what}" for what, number in counts["skipped"].items()]
    click.echo(
        f"{plural(counts['events'], 'event')} in {plural(counts['files'], 'file')}, "
        f"{plural(counts['duplicates'], 'duplicate')} dropped"
        + (f"; {', '.join(notes)}" if notes else "")
    )


def _print_comparison(comparison: dict[str, Any]) -> None:
    from aztask.spark.report.comparison import FIGURES, LEVELS_COMPARED, shown

    times = [iso_time(comparison[name]) for name in ("begin", "split", "end")]
    click.echo(f"{times[0]} to {times[1]} beside {times[1]} to {times[2]} ({comparison['about']})")
    for key in LEVELS_COMPARED:
        rows = comparison[f"{key}s"]
        print_table(
            [key, *(name.replace("_", " ") for name in FIGURES)],
            [[row[key], *(shown(row, name, _seconds) for name in FIGURES)] for row in rows],
        )
        click.echo()


def _seconds(value: float) -> str:
    return f"{_rounded(value)} s"


def _cells(key: str, row: dict[str, Any]) -> Sequence[object]:
    from aztask.spark.report.summary import shown_run

    return [
        row[key],
        *(
            shown_run(row, name[4:], lambda value: str(_rounded(value)))
            if name.startswith("run_p")
            else _rounded(row[name])
            for name in COLUMNS.values()
        ),
    ]


def _rounded(value: float | None) -> object:
    """Three significant digits: 0.0123 s is not shown as 0.01."""
    if value is None or isinstance(value, int):
        return value
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
