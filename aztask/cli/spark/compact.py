"""``aztask spark compact``: lines of closed hours become Parquet."""

from __future__ import annotations

from dataclasses import asdict

import click

from aztask.cli.options import Duration, app_option, json_option
from aztask.cli.output import plural, print_json
from aztask.cli.progress import Progress
from aztask.cli.spark.events import events_options
from aztask.cli.spark.session import SessionOptions, open_session


@click.command("compact")
@app_option
@events_options
@click.option(
    "--closed-for",
    type=Duration(),
    default="1h",
    help="Compact an hour when it is over for so long: files of workers that died come late.",
)
@click.option("--keep", is_flag=True, help="Keep the lines; whoever reads passes over them.")
@json_option
def command(
    path: str,
    account_variable: str | None,
    closed_for: float,
    keep: bool,
    wish: SessionOptions,
    as_json: bool,
) -> None:
    """Compact the events of closed hours into Parquet files.

    PATH is a directory or blob://ACCOUNT/CONTAINER. A file appears whole or not at all, and the
    lines that it holds are removed after that; running it again, also after a crash, is harmless.
    """
    with open_session(wish, "aztask compact") as spark:
        from aztask.spark import compact, place_of
        from aztask.spark.queries import told_plainly

        shown: list[Progress] = []

        def progress(done: int, total: int) -> None:
            if not shown:
                shown.append(Progress(total, "files"))
            shown[0].show(done, last=done == total)

        with told_plainly():
            place = place_of(path, account_variable)
            report = compact(spark, place, closed_seconds=closed_for, keep=keep, progress=progress)
    if as_json:
        print_json(asdict(report))
        return
    click.echo(
        f"{plural(report.hours, 'hour')}: {plural(report.source_files, 'file')} of lines "
        f"({report.bytes_before / 1e6:,.1f} MB) are {report.compacted_files:,} compacted "
        f"({report.bytes_after / 1e6:,.1f} MB), {plural(report.events, 'event')}, "
        f"{plural(report.duplicates, 'duplicate')}, {plural(report.odd, 'odd line')}; "
        f"{plural(report.removed, 'file')} removed"
        + (f"; {plural(report.unreadable, 'unreadable file')} left" if report.unreadable else "")
    )
