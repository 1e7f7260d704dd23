"""``aztask spark compact``: JSON lines of closed hours become Parquet files."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from aztask.operate.cli.options import Duration, app_option, json_option
from aztask.operate.cli.output import ProgressLine, local_time, print_json
from aztask.spark.cli.session import (
    SessionOptions,
    check_tables,
    events_options,
    open_session,
    tables_option,
)
from aztask.support.display import plural

if TYPE_CHECKING:
    from aztask.spark import CompactionReport, TableReport
    from aztask.spark.events.places import EventPlace


@click.command("compact")
@app_option
@events_options
@click.option(
    "--closed-for",
    type=Duration(),
    default="1h",
    help="Wait so long after an hour's end: files of dead workers arrive late.",
)
@click.option("--keep", is_flag=True, help="Keep the compacted lines too; readers skip them.")
@tables_option
@json_option
def command(
    path: str,
    account_variable: str | None,
    closed_for: float,
    keep: bool,
    tables: str | None,
    spark_options: SessionOptions,
    as_json: bool,
) -> None:
    """Compact the events of closed hours into Parquet files.

    PATH is a directory or blob://ACCOUNT/CONTAINER. A compacted file appears completely or not at
    all, and its lines are removed only after that. You can run it again at any time, also after a
    crash.

    With --tables, what was compacted and is not in the Delta tables events and odd is added to
    them: each compacted file once, whenever the command dies, and also if it runs twice at once.
    """
    check_tables(tables)
    with open_session(spark_options, "aztask compact") as spark:
        from aztask.spark import compact, place_of
        from aztask.spark.session import translated_errors

        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            took = f" written, after {time.monotonic() - began:.0f} s"
            ProgressLine(total, "compacted files", rate=False).show(done, took, last=True)

        with translated_errors():
            place = place_of(path, account_variable)
            report = compact(spark, place, closed_seconds=closed_for, keep=keep, progress=progress)
            added = None if tables is None else _append(tables, spark, place)
    if as_json:
        print_json(asdict(report) | ({} if added is None else {"tables": asdict(added)}))
        return
    _print(report)
    if added is not None:
        _print_added(added)


def _print(report: CompactionReport) -> None:
    click.echo(
        f"{plural(report.hours, 'hour')}: {plural(report.source_files, 'file')} of lines "
        f"({report.bytes_before / 1e6:,.1f} MB) became {report.compacted_files:,} compacted "
        f"({report.bytes_after / 1e6:,.1f} MB), {plural(report.events, 'event')}, "
        f"{plural(report.duplicates, 'duplicate')}, {plural(report.odd, 'damaged line')}; "
        f"{plural(report.removed, 'file')} removed"
        + (f"; {plural(report.clock_steps, 'step')} back of a clock" if report.clock_steps else "")
        + (f"; {plural(report.unreadable, 'unreadable file')} left" if report.unreadable else "")
        + (
            f"; {plural(report.newer, 'file')} with events of a newer release left"
            if report.newer
            else ""
        )
    )
    if report.open_hours:
        click.echo(
            f"{plural(report.open_hours, 'hour')} not compacted yet: the last can be compacted "
            f"from {local_time(report.open_until)} on (--closed-for)"
        )


def _print_added(added: TableReport) -> None:
    click.echo(
        f"{plural(added.files, 'compacted file')} added to the tables "
        f"({plural(added.rows, 'event')}, {plural(added.odd, 'odd row')}, "
        f"{added.bytes / 1e6:,.1f} MB), {added.there:,} there already"
        + (f"; {plural(added.skipped, 'damaged or removed file')} left" if added.skipped else "")
    )


def _append(tables: str, spark: Any, place: EventPlace) -> TableReport:
    """Add the compacted files of the place to the tables; shows the progress."""
    from aztask.spark import append_events, place_of

    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        took = f" added to the tables, after {time.monotonic() - began:.0f} s"
        ProgressLine(total, "compacted files", rate=False).show(done, took, last=True)

    return append_events(spark, place, place_of(tables), progress=progress)
